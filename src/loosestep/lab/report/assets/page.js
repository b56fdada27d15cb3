// Puts the page together: drawings, legend, theme, printing.

const data = JSON.parse(document.getElementById("data").textContent);
const body = (id) => document.querySelector(`#${id} .body`);
const PRINTED = [690, 230]; // pixels: a page's width less its margins, and a chart's height

function timelines(host, runs) {
  const drawn = runs.filter(({ timeline }) => timeline.ranks.some(({ begin }) => begin.length));
  if (!drawn.length) {
    host.append(html("p", { class: "hint" }, "No timeline was recorded."));
    return [];
  }
  const choice = html("select", { id: "run", "aria-label": "Run" },
    ...drawn.map(({ label }, i) => html("option", { value: i }, label)));
  // Paper has no menu: there a heading says which run is drawn.
  const heading = html("h3", { class: drawn.length > 1 ? "printed" : null });
  host.append(html("div", { class: "bar" }, heading, drawn.length > 1 ? choice : null));
  const made = new Timeline(host);
  const choose = (run) => {
    heading.textContent = run.label;
    made.choose(run.timeline);
  };
  choice.addEventListener("change", () => choose(drawn[choice.value]));
  choose(drawn[0]);
  return [made];
}

function bars(host, runs) {
  if (runs.some(({ sent, copied }) => total(sent) + total(copied))) return [new Bars(host, runs)];
  host.append(html("p", { class: "hint" }, "No bytes were recorded."));
  return [];
}

function themes(chooser) {
  const order = ["auto", "light", "dark"];
  const use = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    chooser.textContent = `Theme: ${name}`;
  };
  let current = "auto";
  // A file opened from disk may not be allowed to remember anything.
  try { current = localStorage.getItem("loosestep-theme") ?? "auto"; } catch { /* as it is */ }
  if (!order.includes(current)) current = "auto";
  use(current);
  chooser.hidden = false;
  chooser.addEventListener("click", () => {
    current = order[(order.indexOf(current) + 1) % order.length];
    use(current);
    try { localStorage.setItem("loosestep-theme", current); } catch { /* as above */ }
  });
}

function printing(drawings) {
  const closed = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => {
    hideTip();
    opened = [...closed()];
    for (const details of opened) details.open = true;
    for (const drawing of drawings) drawing.render(...PRINTED);
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    for (const drawing of drawings) drawing.render();
  });
}

function start() {
  document.body.append(tip);
  for (const cell of document.querySelectorAll("[data-run]")) cell.prepend(swatch(Number(cell.dataset.run)));
  const charts = [
    ...lossCharts(document.querySelector(".charts"), data),
    ...driftChart(body("drift"), data.runs),
  ];
  legend(document.getElementById("legend"), data.runs, charts);
  const drawings = [...charts, ...timelines(body("timeline"), data.runs), ...bars(body("bytes"), data.runs)];
  themes(document.getElementById("theme"));
  printing(drawings);
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const drawing of drawings) drawing.render();
  }).observe(document.body);
}

start();
