"""The look of every report, in one place; inlined, so that a report is a single file.

Colors are custom properties, given once for light and once for dark surroundings; all pairs of
text and ground have a contrast of at least 4.5. Figures flow in a grid whose columns are as many as
fit, which is all that a telephone needs; tables scroll inside their own box, never the page.
"""

CSS = """
:root {
  color-scheme: light dark;
  --ground: #f6f6f4; --card: #ffffff; --ink: #1d1d1f; --soft: #5d5d66; --line: #dcdce0;
  --accent: #b3161f; --bar: #c8302f; --track: #ececf0; --code: #f0f0f3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #141416; --card: #1e1e22; --ink: #ececf0; --soft: #a5a5b0; --line: #38383f;
    --accent: #ff8a86; --bar: #e0524f; --track: #33333a; --code: #29292f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 3rem;
  background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 0 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
h3 span { font-weight: 400; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--accent); }
.soft, figcaption, caption { color: var(--soft); }
section, footer {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  margin: 1.25rem 0; padding: 1.1rem 1.25rem;
}
section.picture { content-visibility: auto; contain-intrinsic-size: auto 34rem; }
.panels {
  display: grid; gap: 1rem; margin: .5rem 0;
  grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr));
}
.panels.large { grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
.charts {
  display: grid; gap: 1.25rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
}
figure { margin: 0; min-width: 0; }
figure img {
  display: block; width: 100%; height: auto;
  border: 1px solid var(--line); border-radius: .3rem;
}
img.coarse { image-rendering: pixelated; }
figure svg { display: block; width: 100%; height: auto; }
figure.wide { grid-column: 1 / -1; }
figure.wide > .scroll { margin: 0; }
figure.wide svg { min-width: 40rem; }
figure svg text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .75rem 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: .4rem; list-style: none; font-size: .85rem; }
.legend i { width: 1.1rem; height: .3rem; border-radius: .15rem; }
figcaption { font-size: .85rem; margin-top: .35rem; }
figcaption b { color: var(--ink); font-weight: 600; }
.scale { margin-top: .3rem; font-size: .75rem; color: var(--soft); }
.scale i { display: block; height: .5rem; border: 1px solid var(--line); border-radius: .25rem; }
.scale i, .bar i, .legend i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.scale span { display: flex; justify-content: space-between; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; min-width: 18rem; font-size: .9rem; overflow-wrap: normal; }
table, .scale, .sum { font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: .85rem; padding-bottom: .35rem; }
th, td {
  padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top;
}
th { font-weight: 400; }
thead th { color: var(--soft); vertical-align: bottom; }
tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; }
td small { display: block; color: var(--soft); white-space: nowrap; }
tr[aria-current] th { color: var(--accent); font-weight: 600; }
table.classes { width: 100%; max-width: 34rem; }
table.classes td:last-child {
  width: 45%; min-width: 6rem; padding-right: 0; vertical-align: middle;
}
.bar {
  display: block; height: .6rem; overflow: hidden;
  border-radius: .3rem; background: var(--track);
}
.bar i { display: block; height: 100%; background: var(--bar); }
.sum { font-size: .9rem; color: var(--soft); max-width: none; }
.sum b { color: var(--ink); font-weight: 600; white-space: nowrap; }
pre {
  background: var(--code); border-radius: .4rem; padding: .7rem .9rem; margin: .5rem 0;
  font: .82rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap;
}
summary { cursor: pointer; }
dl {
  display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem;
  margin: .5rem 0; font-size: .9rem;
}
dt { color: var(--soft); }
dd { margin: 0; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 2rem; }
  section, footer { padding: .9rem .8rem; }
  .panels, .panels.large { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem; }
  th, td { padding-right: .6rem; }
}
@media print { section { break-inside: avoid; content-visibility: visible; } }
"""
