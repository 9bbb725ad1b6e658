// What the camera takes is uploaded as if it were dropped; computers without one offer files.
element.addEventListener("change", event => {
  const upload = document.querySelector("#upload input[type=file]");
  if (!upload || !event.target.files?.length) return;
  const given = new DataTransfer();
  for (const picture of event.target.files) given.items.add(picture);
  upload.files = given.files;
  upload.dispatchEvent(new Event("change", {bubbles: true}));
  event.target.value = "";
});
