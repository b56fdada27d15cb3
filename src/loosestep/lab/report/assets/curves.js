// Loss against seconds, steps and bytes, and drift against steps.

const timeUnit = (high) => (high < 600 ? 1 : high < 36000 ? 60 : 3600);

const AXES = [
  { key: "seconds", title: "against seconds", xLabel: "time", unit: timeUnit,
    showX: show.seconds, showCursor: (value) => `after ${show.seconds(value)}`, fullHeight: 340 },
  { key: "step", title: "against steps", xLabel: "step",
    showX: show.plain, showCursor: (value) => `step ${show.plain(value)}` },
  { key: "sent", title: "against bytes sent per worker", xLabel: "bytes sent per worker",
    showX: show.size, showCursor: (value) => `after ${show.size(value)} sent` },
];

function lossEntries(runs, key) {
  const line = (columns, name, marked, dash) => {
    const known = columns[key].map((value, i) => i).filter((i) => columns[key][i] !== null);
    return { name, marked, dash, x: known.map((i) => columns[key][i]), y: known.map((i) => columns.loss[i]) };
  };
  return runs.map((run, index) => ({
    index, label: run.label,
    lines: [line(run.train, "training", false, 0), line(run.evals, "validation", true, index)],
  }));
}

// Bytes of runs often lie decades apart; on a linear axis the thrifty one would be a vertical line.
function isSpread(entries) {
  const ends = entries.flatMap(({ lines }) => lines.slice(0, 1)).map(({ x }) => x[x.length - 1] ?? 0);
  const positive = ends.filter((end) => end > 0);
  return positive.length > 1 && Math.max(...positive) > 10 * Math.min(...positive);
}

function lossCharts(host, { runs, target }) {
  return AXES.map((axis) => {
    const entries = lossEntries(runs, axis.key);
    if (!entries.some(({ lines }) => lines.some(({ x }) => x.length))) {
      host.append(html("figure", {}, html("h3", {}, axis.title), html("p", { class: "hint" }, "Not recorded.")));
      return null;
    }
    return new Chart(host, {
      ...axis, entries, target, yLabel: "loss", showY: show.loss,
      isLogX: axis.key === "sent" && isSpread(entries),
    });
  }).filter((chart) => chart !== null);
}

function driftChart(host, runs) {
  const entries = runs.map((run, index) => ({
    index, label: run.label,
    lines: Object.entries(run.drift).map(([level, { step, drift }], i) => ({
      name: level, tag: level, marked: true, dash: index + i, x: step, y: drift,
    })),
  })).filter(({ lines }) => lines.length);
  if (!entries.length) {
    host.append(html("p", { class: "hint" }, "No drift was recorded: it is measured where parameters are averaged."));
    return [];
  }
  return [new Chart(host, {
    key: "drift", title: "against steps, by level", xLabel: "step", yLabel: "drift", fullHeight: 260, entries,
    showX: show.plain, showY: digits, showCursor: (value) => `step ${show.plain(value)}`,
  })];
}

// One button for each run: a click hides it in all charts.
function legend(host, runs, charts) {
  runs.forEach((run, index) => {
    const made = button("", () => {
      const isShown = made.getAttribute("aria-pressed") === "true";
      made.setAttribute("aria-pressed", !isShown);
      for (const chart of charts) {
        if (isShown) chart.hidden.add(index);
        else chart.hidden.delete(index);
        chart.render();
      }
    }, { "aria-pressed": true, class: "" });
    made.append(swatch(index), run.label);
    host.append(made);
  });
}
