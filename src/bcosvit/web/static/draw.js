// A box that is drawn with a pointer and shown on all pictures.
let stage = null, start = null, box = null;
const within = (value, end) => Math.min(Math.max(Math.floor(value), 0), end - 1);
const at = event => {
  const edge = stage.getBoundingClientRect();
  const width = Number(stage.dataset.width), height = Number(stage.dataset.height);
  return {
    x: within((event.clientX - edge.left) / edge.width * width, width),
    y: within((event.clientY - edge.top) / edge.height * height, height),
    width, height,
  };
};
const between = (a, b) => ({
  x: Math.min(a.x, b.x), y: Math.min(a.y, b.y),
  width: Math.abs(a.x - b.x) + 1, height: Math.abs(a.y - b.y) + 1,
});
// A click is a square of an eighth of the picture around it.
const around = point => {
  const side = Math.max(1, Math.round(point.width / 8));
  const x = Math.min(Math.max(point.x - Math.floor(side / 2), 0), point.width - side);
  const y = Math.min(Math.max(point.y - Math.floor(side / 2), 0), point.height - side);
  return {x, y, width: side, height: side};
};
const draw = () => {
  for (const rectangle of element.querySelectorAll("rect"))
    for (const name of ["x", "y", "width", "height"]) rectangle.setAttribute(name, box[name]);
};
element.addEventListener("pointerdown", event => {
  stage = event.target.closest(".enlarge") ? null : event.target.closest(".stage");
  if (!stage || event.button) { stage = null; return; }
  event.preventDefault();
  stage.setPointerCapture(event.pointerId);
  start = at(event);
});
element.addEventListener("pointermove", event => {
  if (!stage) return;
  box = between(start, at(event));
  draw();
});
element.addEventListener("pointerup", event => {
  if (!stage) return;
  const end = at(event);
  box = end.x === start.x && end.y === start.y ? around(end) : between(start, end);
  draw();
  stage = null;
  trigger("input", box);
});
element.addEventListener("pointercancel", () => { stage = null; });
