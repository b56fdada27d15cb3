// Bytes by kind and level: one stacked bar a run for the network, one for memory.

const BAR = { label: 20, sent: 18, copied: 10, gap: 18, right: 96 };

class Bars {
  constructor(host, runs) {
    this.runs = runs;
    this.names = [...new Set(runs.flatMap(({ sent, copied }) => [...Object.keys(sent), ...Object.keys(copied)]))];
    this.svg = svg("svg", { role: "img", "aria-label": "Bytes by kind and level of every run" });
    host.append(html("figure", {}, this.keys(), this.svg));
    this.svg.addEventListener("pointerleave", hideTip);
  }

  keys() {
    return html("div", { class: "bar" }, ...this.names.map((name, i) =>
      html("span", { class: `key kind-${i % 6}` }, html("i"), spoken(name))));
  }

  render(width = this.svg.parentElement.clientWidth) {
    if (!width) return;
    const sums = this.runs.flatMap(({ sent, copied }) => [total(sent), total(copied)]);
    const unit = (width - BAR.right) / (Math.max(...sums) || 1);
    const stripes = svg("pattern", { id: "stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("path", { class: "stripe", d: "M0 0V6" }));
    const parts = [svg("defs", {}, stripes)];
    let top = 0;
    this.runs.forEach((run) => {
      parts.push(svg("text", { class: "strong", x: 0, y: top + 14 }, shortened(run.label, width / 7.5)));
      top += BAR.label;
      parts.push(...this.bar(run, "sent", top, unit));
      top += BAR.sent + 3;
      if (total(run.copied)) {
        parts.push(...this.bar(run, "copied", top, unit));
        top += BAR.copied;
      }
      top += BAR.gap;
    });
    fill(this.svg, { width, height: top, viewBox: `0 0 ${width} ${top}` }, []);
    this.svg.replaceChildren(...parts);
  }

  bar(run, what, top, unit) {
    const height = BAR[what];
    const parts = [];
    let x = 0;
    this.names.forEach((name, i) => {
      const value = run[what][name] ?? 0;
      if (!value) return;
      const at = { x, y: top, width: Math.max(1, value * unit), height };
      const group = svg("g", { class: `kind-${i % 6}` }, svg("rect", { class: "part", ...at }));
      if (what === "copied") group.append(svg("rect", { fill: "url(#stripes)", ...at }));
      group.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY,
        html("b", {}, run.label),
        html("div", {}, `${spoken(name)}: ${show.size(value)} ${what === "sent" ? "sent" : "through memory"} per worker`)));
      parts.push(group);
      x += at.width;
    });
    const all = show.size(total(run[what]));
    parts.push(svg("text", { x: x + 6, y: top + height / 2 + 4 }, what === "sent" ? all : `${all}, memory`));
    return parts;
  }
}

const total = (amounts) => Object.values(amounts).reduce((a, b) => a + b, 0);

// A label's start: text in a drawing does not wrap, and the legend has all of it.
const shortened = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);

// "parameters/world" as it is said.
const spoken = (name) => name.replace("/", " over ");
