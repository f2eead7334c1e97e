"use strict";
// Draws the charts, and switches runs on and off in charts, tables and texts alike.
(() => {
  const style = getComputedStyle(document.documentElement);
  const config = {
    font: style.getPropertyValue("--font"),
    view: { stroke: null },
    axis: {
      labelColor: "var(--muted)", titleColor: "var(--ink)", domainColor: "var(--line)", tickColor: "var(--line)",
      gridColor: "var(--grid)", labelFontSize: 12, titleFontSize: 13, titleFontWeight: "normal", labelLimit: 140,
    },
    legend: { labelColor: "var(--ink)", titleColor: "var(--ink)", labelFontSize: 12, titleFontSize: 13 },
  };
  const switched = [];
  const switches = [...document.querySelectorAll("#switches input")];

  // Vega numbers the points of a chart, which is of no use to a reader.
  function formatTooltip(values, sanitize) {
    const rows = Object.entries(values).filter(([name]) => !name.startsWith("_"));
    const cells = ([name, value]) => `<tr><td class="key">${sanitize(name)}</td><td>${sanitize(value)}</td></tr>`;
    return `<table>${rows.map(cells).join("")}</table>`;
  }

  function show() {
    const names = switches.filter((it) => it.checked).map((it) => it.value);
    switches.forEach((it, number) => {
      for (const part of document.querySelectorAll(`[data-run="${number}"]`)) part.hidden = !it.checked;
    });
    for (const { view, figure, runs } of switched) {
      const shown = names.filter((it) => runs.has(it));
      figure.hidden = !shown.length;
      if (shown.length) view.signal("shown", shown).runAsync();
    }
    // A chart that was hidden had no width to be drawn in.
    window.dispatchEvent(new Event("resize"));
  }

  async function draw() {
    const specs = JSON.parse(document.getElementById("specs").textContent);
    const options = { actions: false, renderer: "svg", ast: true, config, tooltip: { theme: "page", formatTooltip } };
    await Promise.all(Object.entries(specs).map(async ([id, spec]) => {
      const chart = document.getElementById(id);
      const runs = new Set(spec.data.values.map((it) => it.run));
      const { view } = await vegaEmbed(chart, spec, options);
      if (spec.params) switched.push({ view, figure: chart.closest("figure"), runs });
    }));
    for (const it of switches) it.addEventListener("change", show);
    document.documentElement.dataset.ready = "true";
  }

  // Paper has no folds.
  window.addEventListener("beforeprint", () => {
    for (const it of document.querySelectorAll("details")) it.open = true;
  });
  draw();
})();
