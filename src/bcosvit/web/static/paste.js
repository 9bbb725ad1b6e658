() => {
document.addEventListener("click", event => {
  // A picture is shown as large as the window, until a click or Escape.
  const image = event.target.closest(".enlarge")?.parentElement.querySelector("img");
  if (!image) return;
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.append(image.cloneNode());
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
});
document.addEventListener("paste", event => {
  // A picture that is pasted anywhere on the page is uploaded.
  const pictures = [...event.clipboardData.files].filter(file => file.type.startsWith("image/"));
  const input = document.querySelector("#upload input[type=file]");
  if (!pictures.length || !input) return;
  event.preventDefault();
  const given = new DataTransfer();
  for (const picture of pictures) given.items.add(picture);
  input.files = given.files;
  input.dispatchEvent(new Event("change", {bubbles: true}));
});
}
