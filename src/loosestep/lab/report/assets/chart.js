// A line chart: hover, zoom by dragging, keyboard, linear or logarithmic axes.
//
// `entries` are runs: { index, label, lines: [{ name, marked, dash, x, y }] }, every x sorted.

const MARGIN = { left: 58, right: 14, top: 10, bottom: 40 };
const NEAR = 4; // pixels: a point this close to the cursor is at the cursor

class Chart {
  constructor(host, options) {
    Object.assign(this, { fullHeight: 300, target: null, isLogX: false, isLogY: false }, options);
    this.zoom = null; // [low, high], or null for everything
    this.cursor = null; // a value of x
    this.hidden = new Set();
    this.svg = svg("svg", {
      class: "plot", tabindex: 0, role: "img", "aria-label": `${this.yLabel}, ${this.title}`,
    });
    host.append(html("figure", {}, this.toolbar(), this.svg));
    this.listen();
  }

  toolbar() {
    const toggle = (text, name) => {
      const made = button(text, () => {
        this[name] = !this[name];
        made.setAttribute("aria-pressed", this[name]);
        this.zoom = null;
        this.render();
      }, { "aria-pressed": this[name] });
      return made;
    };
    this.resetButton = button("Reset zoom", () => this.reset());
    return html("div", { class: "bar" }, html("h3", {}, this.title),
      toggle("log x", "isLogX"), toggle("log y", "isLogY"), this.resetButton);
  }

  reset() {
    this.zoom = null;
    this.render();
  }

  // ---- what is seen ----

  lines() {
    return this.entries.filter((entry) => !this.hidden.has(entry.index))
      .flatMap((entry) => entry.lines.map((line) => ({ ...line, entry })));
  }

  visible({ x }, [low, high]) {
    return [Math.max(0, lowerBound(x, low) - 1), Math.min(x.length, lowerBound(x, high) + 2)];
  }

  wholeX() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of this.lines()) {
      const first = this.isLogX ? x.find((value) => value > 0) : x[0];
      if (finite(first ?? null)) [low, high] = [Math.min(low, first), Math.max(high, x[x.length - 1])];
    }
    if (low > high) return this.isLogX ? [1, 10] : [0, 1];
    if (!this.isLogX && low > 0 && low < high / 10) low = 0; // the first record is not the start
    return low < high ? [low, high] : this.isLogX ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  }

  rangeY(domain) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of this.lines()) {
      const [from, to] = this.visible(line, domain);
      for (let i = from; i < to; i++) {
        const value = line.y[i];
        if (!finite(value) || (this.isLogY && value <= 0)) continue;
        if (line.x[i] < domain[0] || line.x[i] > domain[1]) continue;
        [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    if (low > high) return this.isLogY ? [0.1, 1] : [0, 1];
    if (this.isLogY) return [low / 1.05, high * 1.05];
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return [low - (low >= 0 ? Math.min(pad, low) : pad), high + pad];
  }

  // ---- drawing ----

  render(width = this.svg.parentElement.clientWidth, height = this.fullHeight) {
    if (!width) return;
    Object.assign(this, { width, height });
    const domain = this.zoom ?? this.wholeX();
    const [low, high] = this.rangeY(domain);
    this.x = scale({ low: domain[0], high: domain[1], from: MARGIN.left, to: width - MARGIN.right, isLog: this.isLogX });
    this.y = scale({ low, high, from: this.height - MARGIN.bottom, to: MARGIN.top, isLog: this.isLogY });
    fill(this.svg, { width, height: this.height, viewBox: `0 0 ${width} ${this.height}` }, []);
    this.overlay = svg("g");
    this.svg.replaceChildren(this.axes(domain), this.drawn(domain), this.overlay);
    this.resetButton.disabled = this.zoom === null;
    this.svg.dataset.low = domain[0];
    this.svg.dataset.high = domain[1];
    this.point();
  }

  axes(domain) {
    const bottom = this.height - MARGIN.bottom;
    const right = this.width - MARGIN.right;
    const unit = this.unit ? this.unit(domain[1]) : 1;
    const all = svg("g");
    for (const value of this.x.ticks(Math.max(2, this.width / 110), unit)) {
      const at = this.x(value);
      all.append(svg("path", { class: "grid", d: `M${at} ${MARGIN.top}V${bottom}` }),
        svg("text", { class: "x-tick", x: at, y: bottom + 16, "text-anchor": "middle" }, this.showX(value)));
    }
    for (const value of this.y.ticks(5)) {
      const at = this.y(value);
      all.append(svg("path", { class: "grid", d: `M${MARGIN.left} ${at}H${right}` }),
        svg("text", { class: "y-tick", x: MARGIN.left - 7, y: at + 4, "text-anchor": "end" }, digits(value)));
    }
    const middle = (MARGIN.top + bottom) / 2;
    all.append(
      svg("path", { class: "frame", d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${right}` }),
      svg("text", { x: right, y: this.height - 6, "text-anchor": "end" }, this.xLabel),
      svg("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, this.yLabel));
    return all;
  }

  drawn(domain) {
    const id = `clip-${this.key}`;
    const [wide, high] = [this.width - MARGIN.left - MARGIN.right, this.height - MARGIN.top - MARGIN.bottom];
    const clip = svg("clipPath", { id },
      svg("rect", { x: MARGIN.left - 5, y: MARGIN.top - 5, width: wide + 10, height: high + 10 }));
    this.tags = [];
    const inside = svg("g", { "clip-path": `url(#${id})` });
    // Thin lines first: the marked ones are read, and must lie on top.
    const order = this.lines().sort((a, b) => a.marked - b.marked);
    for (const line of order) inside.append(this.line(line, domain));
    if (this.target !== null) inside.append(this.targetLine());
    return svg("g", {}, clip, inside);
  }

  targetLine() {
    const at = this.y(this.target);
    const place = this.isLogX // curves that end early leave room on the right, late ones on the left
      ? { x: MARGIN.left + 5 } : { x: this.width - MARGIN.right - 4, "text-anchor": "end" };
    return svg("g", {},
      svg("path", { class: "target", d: `M${MARGIN.left} ${at}H${this.width - MARGIN.right}` }),
      svg("text", { class: "over", y: at - 10, ...place }, `target ${show.loss(this.target)}`));
  }

  line(line, domain) {
    const points = this.pixels(line, domain);
    const group = svg("g", { class: runClass(line.entry.index) },
      svg("path", {
        class: `line ${line.marked ? `marked ${dashClass(line.dash)}` : "thin"}`, d: joined(points),
      }));
    if (line.marked) {
      const seen = points.filter((point) => point !== null);
      const stride = Math.ceil(seen.length / Math.max(1, this.width / 16));
      const marks = seen.filter((_, i) => i % stride === 0 || i === seen.length - 1);
      group.append(svg("path", { class: "marks", d: marks.map(([x, y]) => shape(line.entry.index, x, y)).join("") }));
      if (line.tag && seen.length) group.append(this.tag(line.tag, seen[seen.length - 1]));
    }
    return group;
  }

  // A line's name at its end; where another of the same name ends nearby, one is enough.
  tag(text, [x, y]) {
    const near = this.tags.some((tag) => tag.text === text && Math.abs(tag.y - y) < 16);
    this.tags.push({ text, y });
    const right = Math.min(x, this.width - MARGIN.right) - 6;
    return svg("text", { class: "over", x: right, y: y - 9, "text-anchor": "end" }, near ? "" : text);
  }

  // The points of a line in pixels, null where it breaks. Of many points on one pixel column the
  // first, smallest, largest and last are kept: what is drawn is the same.
  pixels({ x, y }, domain) {
    const [from, to] = this.visible({ x }, domain);
    const points = [];
    let column = [];
    const flush = () => {
      if (column.length <= 4) points.push(...column);
      else {
        const low = column.reduce((a, b) => (b[1] < a[1] ? b : a));
        const high = column.reduce((a, b) => (b[1] > a[1] ? b : a));
        points.push(column[0], low, high, column[column.length - 1]);
      }
      column = [];
    };
    for (let i = from; i < to; i++) {
      const drawable = finite(y[i]) && finite(x[i]) && !(this.isLogX && x[i] <= 0) && !(this.isLogY && y[i] <= 0);
      if (!drawable) {
        flush();
        points.push(null);
        continue;
      }
      const point = [this.x(x[i]), this.y(y[i])];
      if (column.length && Math.floor(point[0]) !== Math.floor(column[0][0])) flush();
      column.push(point);
    }
    flush();
    return points;
  }

  // ---- cursor and tooltip ----

  nearest({ x }, value) {
    if (!x.length) return -1;
    const after = Math.min(lowerBound(x, value), x.length - 1);
    const before = Math.max(0, after - 1);
    return Math.abs(this.x(x[before]) - this.x(value)) < Math.abs(this.x(x[after]) - this.x(value)) ? before : after;
  }

  point() {
    this.overlay.replaceChildren();
    if (this.cursor === null) return;
    const at = this.x(this.cursor);
    this.overlay.append(svg("path", { class: "cursor", d: `M${at} ${MARGIN.top}V${this.height - MARGIN.bottom}` }));
    for (const line of this.lines()) {
      const i = this.nearest(line, this.cursor);
      if (i < 0 || !finite(line.y[i]) || Math.abs(this.x(line.x[i]) - at) > 40) continue;
      const dot = svg("circle", { class: "dot", cx: this.x(line.x[i]), cy: this.y(line.y[i]), r: 3.5 });
      this.overlay.append(svg("g", { class: runClass(line.entry.index) }, dot));
    }
  }

  tooltip(x, y) {
    const shown = this.entries.filter((entry) => !this.hidden.has(entry.index));
    const names = [...new Set(shown.flatMap((entry) => entry.lines.map((line) => line.name)))];
    const head = html("tr", {}, html("th"), ...names.map((name) => html("th", {}, name)));
    const rows = shown.map((entry) => html("tr", {}, html("th", {}, swatch(entry.index), entry.label),
      ...names.map((name) => this.cell(entry.lines.find((line) => line.name === name)))));
    showTip(x, y, html("b", {}, this.showCursor(this.cursor)),
      html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows)));
  }

  cell(line) {
    const i = line ? this.nearest(line, this.cursor) : -1;
    if (i < 0) return html("td", {}, "–");
    const last = line.x[line.x.length - 1];
    const away = Math.abs(this.x(line.x[i]) - this.x(this.cursor)) > NEAR;
    if (away && this.cursor > last) return html("td", {}, html("small", {}, `ended at ${this.showX(last)}`));
    const note = away ? html("small", {}, ` at ${this.showX(line.x[i])}`) : null;
    return html("td", {}, line.y[i] === null ? "not a number" : this.showY(line.y[i]), note);
  }

  // ---- pointer and keyboard ----

  listen() {
    let start = null;
    const inside = (event) => {
      const at = event.clientX - this.svg.getBoundingClientRect().left;
      return Math.max(MARGIN.left, Math.min(at, this.width - MARGIN.right));
    };
    this.svg.addEventListener("pointerdown", (event) => {
      start = inside(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const at = inside(event);
      this.cursor = this.x.invert(at);
      this.point();
      this.tooltip(event.clientX, event.clientY);
      if (start !== null) this.brush(start, at);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const at = inside(event);
      if (start !== null && Math.abs(at - start) > 5) this.zoomTo(this.x.invert(start), this.x.invert(at));
      start = null;
    });
    const leave = () => { start = null; this.cursor = null; this.point(); hideTip(); };
    this.svg.addEventListener("pointercancel", leave);
    this.svg.addEventListener("pointerleave", leave);
    this.svg.addEventListener("blur", leave);
    this.svg.addEventListener("dblclick", () => this.reset());
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }

  brush(from, to) {
    this.overlay.append(svg("rect", {
      class: "brush", x: Math.min(from, to), y: MARGIN.top, width: Math.abs(to - from),
      height: this.height - MARGIN.top - MARGIN.bottom,
    }));
  }

  zoomTo(a, b) {
    this.zoom = [Math.min(a, b), Math.max(a, b)];
    this.render();
  }

  // Zoom about the cursor; a factor below 1 shows less.
  zoomBy(factor) {
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    const centre = this.cursor === null ? (left + right) / 2 : this.x(this.cursor);
    const whole = this.wholeX();
    const low = Math.max(whole[0], this.x.invert(centre - (centre - left) * factor));
    const high = Math.min(whole[1], this.x.invert(centre + (right - centre) * factor));
    this.zoom = low <= whole[0] && high >= whole[1] ? null : [low, high];
    this.render();
  }

  press(event) {
    const actions = {
      ArrowLeft: () => this.walk(-1), ArrowRight: () => this.walk(1),
      "+": () => this.zoomBy(0.6), "=": () => this.zoomBy(0.6), "-": () => this.zoomBy(1 / 0.6),
      0: () => this.reset(), Escape: () => { this.cursor = null; hideTip(); this.reset(); },
    };
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  walk(direction) {
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    const at = this.cursor === null ? (left + right) / 2 : this.x(this.cursor) + direction * (right - left) / 60;
    this.cursor = this.x.invert(Math.max(left, Math.min(right, at)));
    this.point();
    const box = this.svg.getBoundingClientRect();
    this.tooltip(box.left + this.x(this.cursor), box.top + 40);
  }
}

function joined(points) {
  let pen = "M";
  let path = "";
  for (const point of points) {
    if (point === null) pen = "M";
    else {
      path += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      pen = "L";
    }
  }
  return path;
}
