"""The look of a page: its style sheet, and the script that draws the plots in the reader's colours.

Line colours are those of Okabe and Ito, which stay apart for colour-blind readers, lightened on dark ground.
"""

STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --ink: #1d2329; --soft: #59636e; --rule: #d9dee3; --panel: #f5f7f9;
  --series: #0072b2, #d55e00, #009e73, #b5579b, #b07d00, #3a9bd9, #7a4fbf, #5f6b76; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14181c; --ink: #e4e8ec; --soft: #a0abb6; --rule: #333c45; --panel: #1c2228;
  --series: #4fb0ea, #ff8c42, #2fd0a2, #e08fc6, #e6b43c, #8cc8f2, #b596f0, #a9b5c0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 2rem 1.25rem 4rem; background: var(--ground);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
  "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0; }
p, li { max-width: 75ch; } p { margin: .6rem 0; }
.subtitle { color: var(--soft); font-size: 1.05rem; margin: 0; }
a { color: inherit; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .92em;
  background: var(--panel); padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--panel); padding: .8rem 1rem; border-radius: 4px; }
pre code { background: none; padding: 0; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .94rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .92rem; padding-bottom: .4rem; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid var(--rule); }
th, td { padding: .35rem .9rem .35rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--rule); } .number { text-align: right; }
.plots { display: grid; gap: 1.5rem 1.75rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; min-width: 0;
  display: flex; flex-direction: column; justify-content: space-between; }
figcaption p { color: var(--soft); font-size: .9rem; margin: .1rem 0; }
.plot { height: 340px; }
details { margin: .8rem 0; } summary { cursor: pointer; }
.note { border-left: 4px solid var(--rule); background: var(--panel); padding: .5rem .9rem; margin: .8rem 0; }
.note.bad { border-color: #d55e00; }
@media print { .plots { display: block; } figure { break-inside: avoid; } }
"""

DRAW_SCRIPT = """
"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function coloured(trace, palette) {
    const colour = palette[trace.ink[0] % palette.length];
    const dash = ["solid", "dash", "dot"][(trace.ink[1] + Math.floor(trace.ink[0] / palette.length)) % 3];
    const drawn = Object.assign({}, trace, { legendgroup: trace.ink.join() });
    delete drawn.ink; delete drawn.band;
    if (trace.error_y) Object.assign(drawn.error_y, { color: css("--ink"), thickness: 1.5, width: 5 });
    if (trace.type === "bar") return Object.assign(drawn, { marker: { color: colour } });
    if (!trace.band) return Object.assign(drawn, { line: { color: colour, width: 2, dash: dash } });
    return Object.assign(drawn, { line: { width: 0 }, fillcolor: colour + "33", showlegend: false,
      hoverinfo: "skip" });
  }
  function axis(given) {
    return Object.assign({ gridcolor: css("--rule"), zerolinecolor: css("--rule"), linecolor: css("--rule"),
      automargin: true, nticks: 7, exponentformat: "power", minexponent: 5, separatethousands: true }, given,
      { title: { text: given.title, font: { size: 13 }, standoff: 8 } });
  }
  function draw() {
    const palette = css("--series").split(",").map(text => text.trim());
    figures.forEach((figure, number) => {
      const layout = Object.assign({ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
        margin: { l: 56, r: 12, t: figure.legend ? 48 : 24, b: 46 }, hovermode: "x unified", showlegend: figure.legend,
        hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--rule"), font: { color: css("--ink") } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
        xaxis: axis(figure.axes.x), yaxis: axis(figure.axes.y) }, figure.layout);
      Plotly.react("plot-" + number, figure.traces.map(trace => coloured(trace, palette)), layout,
        { responsive: true, displaylogo: false, plotlyServerURL: "",
          modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d"]] });
    });
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
"""
