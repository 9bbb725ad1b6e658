() => document.addEventListener("paste", event => {
  // A picture that is pasted anywhere on the page is uploaded.
  const pictures = [...event.clipboardData.files].filter(file => file.type.startsWith("image/"));
  const input = document.querySelector("#upload input[type=file]");
  if (!pictures.length || !input) return;
  event.preventDefault();
  const given = new DataTransfer();
  for (const picture of pictures) given.items.add(picture);
  input.files = given.files;
  input.dispatchEvent(new Event("change", {bubbles: true}));
})
