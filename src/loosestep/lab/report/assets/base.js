// Elements, numbers and scales that every drawing uses.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  // Strings become text nodes: nothing that came from a run is ever parsed as HTML.
  element.append(...children.filter((child) => child !== null));
  return element;
}

const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);
const html = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

function button(text, action, attributes = {}) {
  const made = html("button", { type: "button", class: "tool", ...attributes }, text);
  made.addEventListener("click", action);
  return made;
}

// ---- numbers ----

const finite = (value) => value !== null && Number.isFinite(value);
const digits = (value) => String(+value.toPrecision(4));

const show = {
  plain: (value) => Math.round(value).toLocaleString("en"),
  loss: (value) => {
    if (!finite(value)) return "–";
    const size = Math.abs(value);
    return size >= 0.1 && size < 100 ? value.toFixed(3) : String(+value.toPrecision(3));
  },
  seconds: (value) => {
    if (value === 0) return "0 s";
    if (value < 1e-3) return `${digits(value * 1e6)} µs`;
    if (value < 1) return `${digits(value * 1e3)} ms`;
    if (value < 600) return `${digits(value)} s`;
    if (value < 36000) return `${digits(value / 60)} min`;
    return `${digits(value / 3600)} h`;
  },
  size: (value) => {
    const units = ["bytes", "kB", "MB", "GB", "TB"];
    const power = value >= 1000 ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
    return `${+(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
  },
  share: (value) => `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)} %`,
};

// ---- scales ----

function ticks(low, high, count, unit = 1) {
  const rough = (high - low) / unit / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((nice) => nice * power >= rough) * power * unit;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k++) {
    // 12 digits: 3 * 0.1 is 0.30000000000000004.
    found.push(+(k * step).toPrecision(12));
  }
  return found;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return ticks(low, high, count);
  const nice = decades < 3 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / count));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += stride) {
    for (const factor of nice) {
      const value = +(factor * 10 ** power).toPrecision(12);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}

// A scale maps values between `low` and `high` to pixels between `from` and `to`.
function scale({ low, high, from, to, isLog = false }) {
  const warp = isLog ? Math.log : (value) => value;
  const back = isLog ? Math.exp : (value) => value;
  const [a, b] = [warp(low), warp(high)];
  const pixel = (value) => from + ((warp(value) - a) / (b - a)) * (to - from);
  pixel.invert = (at) => back(a + ((at - from) / (to - from)) * (b - a));
  pixel.ticks = (count, unit) => (isLog ? logTicks(low, high, count) : ticks(low, high, count, unit));
  return pixel;
}

// The first index whose value is not below `value`; `values` must be sorted.
function lowerBound(values, value) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- marks: every run has a colour, a dash and a shape ----

const runClass = (index) => `run-${index % 8}`;
const dashClass = (index) => `dash-${(index + Math.floor(index / 8)) % 5}`;

function shape(index, x, y, r = 3.6) {
  const at = (dx, dy) => `${(x + dx * r).toFixed(1)} ${(y + dy * r).toFixed(1)}`;
  const closed = (...points) => `M${points.map((point) => at(...point)).join("L")}Z`;
  switch (index % 5) {
    case 0: return `M${at(-1, 0)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
    case 1: return closed([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]);
    case 2: return closed([0, -1.25], [1.15, 0.85], [-1.15, 0.85]);
    case 3: return closed([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]);
    default: return closed([0, 1.25], [1.15, -0.85], [-1.15, -0.85]);
  }
}

function swatch(index) {
  return svg("svg", { class: `swatch ${runClass(index)}`, viewBox: "0 0 36 12", "aria-hidden": "true" },
    svg("path", { class: `line marked ${dashClass(index)}`, d: "M0 6H36" }),
    svg("path", { class: "marks", d: shape(index, 18, 6) }));
}

// ---- the tooltip: one for the page ----

const tip = html("div", { class: "tip", role: "status", hidden: "" });

function showTip(x, y, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 18 + width > innerWidth ? x - width - 18 : x + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
}

const hideTip = () => { tip.hidden = true; };
