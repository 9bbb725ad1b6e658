// A list of buttons of which one is pressed.
let pending;
element.addEventListener("click", event => {
  const button = event.target.closest("button[data-index]");
  if (!button) return;
  // At once, and without rendering the list again, which would lose the focus.
  for (const each of element.querySelectorAll("button[data-index]"))
    each.setAttribute("aria-pressed", each === button);
  // Answers to clicks that follow each other fast may come in another order: only the last is sent.
  clearTimeout(pending);
  pending = setTimeout(() => trigger("select", {index: Number(button.dataset.index)}), 60);
});
