// The list of classes, filtered by what is typed.
element.addEventListener("input", event => {
  if (event.target.type !== "search") return;
  const wanted = event.target.value.trim().toLowerCase();
  for (const item of element.querySelectorAll(".known li"))
    item.hidden = !item.textContent.toLowerCase().includes(wanted);
});
