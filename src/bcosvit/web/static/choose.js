// A list of buttons of which one is pressed.
element.addEventListener("click", event => {
  const button = event.target.closest("button[data-index]");
  if (!button) return;
  // At once, and without rendering the list again, which would lose the focus.
  for (const each of element.querySelectorAll("button[data-index]"))
    each.setAttribute("aria-pressed", each === button);
  trigger("select", {index: Number(button.dataset.index)});
});
