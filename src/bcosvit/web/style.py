"""The page's look and the little script that it needs, on top of Gradio's own.

Colors are Gradio's variables, which know light from dark. Nothing is loaded from anywhere: fonts
are the system's.
"""

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace")

CSS = """
.gradio-container { width: 100% !important; max-width: 78rem !important; }
.gradio-container .html-container { padding: 0 !important; }
#results { gap: .9rem; }
#exact { gap: .6rem; }
.part { border-top: 1px solid var(--border-color-primary); padding-top: .9rem; margin-top: .3rem; }
.gradio-container h1 { font-size: 1.6rem; font-weight: 650; line-height: 1.2; margin: .5rem 0 0; }
.gradio-container h2 { font-size: 1.25rem; font-weight: 650; margin: 0; overflow-wrap: anywhere; }
.gradio-container h3 { font-size: 1rem; font-weight: 650; margin: 0; }
h2 small { font-size: .95rem; font-weight: 400; color: var(--body-text-color-subdued); }
.soft, figcaption, .empty, .hint { color: var(--body-text-color-subdued); }
.hint { font-size: .9rem; margin: .15rem 0 0; max-width: 60rem; }
header p { margin: .25rem 0 .5rem; overflow-wrap: anywhere; }
.empty {
  margin: 0; padding: 1rem; border-radius: .5rem; text-align: center; text-wrap: balance;
  background: var(--background-fill-secondary);
}
footer .divider { display: none; }
:is(.strip, .classes) { display: grid; gap: .4rem; }
:is(.strip, .classes) button {
  display: grid; gap: 0 .6rem; align-items: center; width: 100%; text-align: left;
  padding: .45rem .6rem; border: 1px solid var(--border-color-primary); border-radius: .5rem;
  background: var(--background-fill-primary); color: var(--body-text-color); cursor: pointer;
  min-height: 2.75rem; font-size: .95rem; overflow-wrap: anywhere;
}
:is(.strip, .classes) button:hover { border-color: var(--body-text-color-subdued); }
:is(.strip, .classes) button[aria-pressed=true] {
  border-color: var(--color-accent); box-shadow: inset 3px 0 0 var(--color-accent);
}
.classes button { grid-template-columns: 1fr auto; }
.strip button { grid-template-columns: 3rem 1fr; }
.strip img { width: 3rem; height: 3rem; grid-row: span 2; border-radius: .3rem; }
.strip b { align-self: end; } .strip span { align-self: start; font-size: .85rem; }
.bar {
  grid-column: 1 / -1; height: .35rem; margin-top: .3rem; overflow: hidden;
  border-radius: .2rem; background: var(--border-color-primary);
}
.bar i { display: block; height: 100%; background: var(--color-accent); }
.problems { margin: .5rem 0 0; padding: .6rem .75rem; border-radius: .5rem;
  border: 1px solid var(--error-border-color); background: var(--error-background-fill);
  color: var(--error-text-color); overflow-wrap: anywhere; }
.views {
  display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr));
}
.views.small { grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); }
.views figure { margin: 0; min-width: 0; }
.views figcaption { font-size: .85rem; margin-top: .35rem; }
.views figcaption b { color: var(--body-text-color); font-weight: 600; }
.stage { position: relative; line-height: 0; user-select: none; }
.stage img {
  display: block; width: 100%; height: auto; border-radius: .3rem;
  outline: 1px solid var(--border-color-primary); -webkit-user-drag: none;
}
img.coarse { image-rendering: pixelated; }
.stage svg { position: absolute; inset: 0; width: 100%; height: 100%; pointer-events: none; }
.stage rect { fill: none; stroke: #000; stroke-width: 4px; vector-effect: non-scaling-stroke; }
.stage rect + rect { stroke: #fff; stroke-width: 2px; }
.stage rect[width="0"] { display: none; }
#views.drawn .stage { cursor: crosshair; }
/* A finger draws on the first picture and scrolls on the others. */
#views.drawn figure:first-child .stage { touch-action: none; }
.scale { margin-top: .3rem; font-size: .75rem; font-variant-numeric: tabular-nums; }
.scale i { display: block; height: .5rem; border-radius: .25rem;
  outline: 1px solid var(--border-color-primary); }
.scale span { display: flex; justify-content: space-between; }
.facts dl {
  display: grid; grid-auto-flow: column; grid-template-rows: auto auto; justify-content: start;
  gap: 0 1.75rem; margin: 0; font-variant-numeric: tabular-nums;
}
.facts dt { font-size: .85rem; color: var(--body-text-color-subdued); }
.facts dd { margin: 0; font-size: 1.1rem; font-weight: 600; }
.gradio-container :is(button, input, select, textarea, a, [tabindex]):focus-visible {
  outline: 3px solid var(--color-accent) !important; outline-offset: 2px !important;
}
@media (max-width: 40rem) {
  .gradio-container { padding: .5rem !important; }
  .views, .views.small { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem; }
  .facts dl { grid-auto-flow: row; grid-template-columns: auto auto; grid-template-rows: none;
    gap: .1rem 1rem; align-items: baseline; }
  #look { flex-direction: column; }
}
"""

CHOOSE = """
element.addEventListener("click", event => {
  const button = event.target.closest("button[data-index]");
  if (!button) return;
  // Pressed at once, and without making the list anew, which would lose the focus.
  for (const each of element.querySelectorAll("button[data-index]"))
    each.setAttribute("aria-pressed", each === button);
  trigger("select", {index: Number(button.dataset.index)});
});
"""
"""Buttons of a list of which one is pressed."""

DRAW = """
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
  stage = event.target.closest(".stage");
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
"""
"""A box drawn with a pointer, shown on every picture."""

PASTE = """
() => document.addEventListener("paste", event => {
  const pictures = [...event.clipboardData.files].filter(file => file.type.startsWith("image/"));
  const input = document.querySelector("#upload input[type=file]");
  if (!pictures.length || !input) return;
  event.preventDefault();
  const given = new DataTransfer();
  for (const picture of pictures) given.items.add(picture);
  input.files = given.files;
  input.dispatchEvent(new Event("change", {bubbles: true}));
})
"""
"""A picture pasted anywhere is an upload."""

FETCH = """() => document.querySelector("#fetch").click()"""
"""Saves the file that was just made."""
