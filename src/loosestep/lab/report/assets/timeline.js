// Who computed, sent and waited: one row a worker, a view that moves along the run.
//
// Times are microseconds. Where a view holds more spans than pixels, a column's heights are the
// shares of its time, so that a thousand short waits look like what they cost.

const KINDS = ["compute", "send", "wait"];
const [COMPUTE, SEND, WAIT] = [0, 1, 2];
const ROW = { left: 84, right: 14, bar: 18, lane: 6, gap: 10, group: 10, top: 24, axis: 24 };
const OVERVIEW = 26;

class Timeline {
  constructor(host) {
    this.keys = html("span", { class: "grow" });
    const bar = html("div", { class: "bar" }, this.keys,
      button("−", () => this.zoomBy(2), { "aria-label": "Zoom out" }),
      button("+", () => this.zoomBy(0.5), { "aria-label": "Zoom in" }),
      button("Whole run", () => this.show(0, this.data.end)),
      button("First view", () => this.show(...this.data.window)));
    this.overview = svg("svg", { class: "rows overview", "aria-hidden": "true" });
    this.svg = svg("svg", { class: "rows", tabindex: 0, role: "img", "aria-label": "Timeline of all workers" });
    this.note = html("p", { class: "hint" });
    host.append(html("figure", {}, bar, this.overview, this.svg, this.note));
    this.listen();
  }

  choose(data) {
    this.data = data;
    this.view = [...data.window];
    this.waits = null;
    this.offsets = this.layout();
    const notes = [];
    if (data.hidden) notes.push(`${data.hidden} more workers are not shown.`);
    if (data.kept.length > 1) notes.push("Of this long run the start, the middle and the end are kept; grey was left out.");
    this.note.replaceChildren(notes.join(" "));
    this.render();
  }

  // The top of every row, with room between groups.
  layout() {
    let top = ROW.top;
    let group = -1;
    return this.data.ranks.map(({ rank }) => {
      const mine = this.data.groups.findIndex(({ ranks }) => ranks.includes(rank));
      const isFirst = mine !== group && this.data.groups.length > 0;
      if (isFirst) top += ROW.group + 6;
      group = mine;
      const at = { top, title: isFirst ? this.data.groups[mine]?.name : null };
      top += ROW.bar + ROW.lane + ROW.gap;
      return at;
    });
  }

  // ---- drawing ----

  render(width = this.svg.parentElement.clientWidth) {
    if (!width || !this.data) return;
    this.width = width;
    const [low, high] = this.view;
    this.x = scale({ low, high, from: ROW.left, to: width - ROW.right });
    const last = this.offsets[this.offsets.length - 1];
    const bottom = last.top + ROW.bar + ROW.lane + 4;
    fill(this.svg, { width, height: bottom + ROW.axis, viewBox: `0 0 ${width} ${bottom + ROW.axis}` }, []);
    const rows = svg("g", { "clip-path": "url(#clip-rows)" });
    const labels = svg("g");
    const sums = [0, 0, 0];
    this.data.ranks.forEach((row, i) => {
      rows.append(this.row(row, this.offsets[i].top, sums));
      labels.append(...this.labels(row, this.offsets[i]));
    });
    const clip = svg("clipPath", { id: "clip-rows" },
      svg("rect", { x: ROW.left, y: 0, width: width - ROW.left - ROW.right, height: bottom }));
    this.svg.replaceChildren(clip, this.axis(bottom), rows, labels);
    this.svg.dataset.low = low;
    this.svg.dataset.high = high;
    this.drawKeys(sums);
    this.drawOverview(width);
  }

  axis(bottom) {
    const all = svg("g");
    for (const value of this.x.ticks(Math.max(2, this.width / 120), timeUnit(this.view[1] / 1e6))) {
      const at = this.x(value);
      all.append(svg("path", { class: "grid", d: `M${at} ${ROW.top - 6}V${bottom}` }),
        svg("text", { class: "x-tick", x: at, y: bottom + 16, "text-anchor": "middle" }, show.seconds(value / 1e6)));
    }
    return all;
  }

  labels({ rank }, { top, title }) {
    const name = svg("text", { x: ROW.left - 8, y: top + 13, "text-anchor": "end" }, `worker ${rank}`);
    return title ? [svg("text", { class: "strong", x: 0, y: top - 6 }, title), name] : [name];
  }

  row(row, top, sums) {
    const [left, right] = [ROW.left, this.width - ROW.right];
    const group = svg("g", {}, svg("rect", { class: "track", x: left, y: top, width: right - left, height: ROW.bar }));
    for (const [begin, end] of this.gaps()) {
      group.append(svg("rect", {
        class: "missing", x: this.x(begin), y: top, width: Math.max(0, this.x(end) - this.x(begin)), height: ROW.bar,
      }));
    }
    const seen = this.seen(row);
    for (const i of seen) {
      const [begin, end] = [Math.max(row.begin[i], this.view[0]), Math.min(row.begin[i] + row.length[i], this.view[1])];
      sums[row.kind[i]] += Math.max(0, end - begin);
    }
    const paths = seen.length > 1.5 * (right - left) ? this.columns(row, seen, top) : this.boxes(row, seen, top);
    // Waits last: they lie over what they interrupt.
    paths.forEach((d, kind) => group.append(svg("path", { class: KINDS[kind], d })));
    return group;
  }

  // The stretches of the view of which no spans were kept.
  gaps() {
    const { kept } = this.data;
    return kept.slice(1).map(([begin], i) => [kept[i][1], begin]);
  }

  seen(row, [low, high] = this.view) {
    const found = [];
    for (let i = 0; i < row.begin.length && row.begin[i] <= high; i++) {
      if (row.begin[i] + row.length[i] >= low) found.push(i);
    }
    return found;
  }

  boxes(row, seen, top) {
    const paths = ["", "", ""];
    for (const i of seen) {
      const from = this.x(row.begin[i]);
      const whole = this.x(row.begin[i] + row.length[i]) - from;
      const width = Math.max(0.6, whole > 5 ? whole - 0.5 : whole); // neighbours are told apart
      paths[row.kind[i]] += row.kind[i] === SEND
        ? box(from, top + ROW.bar + 1, width, ROW.lane) : box(from, top, width, ROW.bar);
    }
    return paths;
  }

  columns(row, seen, top) {
    const shares = spread(row, seen, this.x, ROW.left, this.width - ROW.right);
    const paths = ["", "", ""];
    for (let c = 0; c < shares[0].length; c++) {
      const [computed, sent, waited] = shares.map((share) => share[c]);
      const x = ROW.left + c;
      const all = Math.max(1, computed + waited);
      const [low, high] = [(computed / all) * ROW.bar, (waited / all) * ROW.bar];
      if (low) paths[COMPUTE] += box(x, top + ROW.bar - low, 1, low);
      if (high) paths[WAIT] += box(x, top + ROW.bar - low - high, 1, high);
      if (sent) paths[SEND] += box(x, top + ROW.bar + 1, 1, Math.min(1, sent) * ROW.lane);
    }
    return paths;
  }

  drawKeys(sums) {
    const whole = (this.view[1] - this.view[0]) * this.data.ranks.length;
    const words = ["computing", "sending", "waiting"];
    const items = [COMPUTE, WAIT, SEND].map((kind) => {
      const square = html("i", { class: kind === SEND ? "lane" : null });
      square.style.setProperty("--kind", `var(--${KINDS[kind]})`);
      return html("span", { class: "key" }, square, `${words[kind]} ${show.share(sums[kind] / whole)}`);
    });
    this.keys.replaceChildren(...items, html("small", { class: "hint" }, "of this view"));
  }

  // The whole run in a strip: the share of waiting, and where the view is.
  drawOverview(width) {
    const whole = scale({ low: 0, high: this.data.end || 1, from: ROW.left, to: width - ROW.right });
    this.whole = whole;
    if (!this.waits || this.waits.width !== width) this.waits = { width, path: this.waiting(whole, width) };
    const [from, to] = this.view.map(whole);
    fill(this.overview, { width, height: OVERVIEW + 4, viewBox: `0 0 ${width} ${OVERVIEW + 4}` }, []);
    this.overview.replaceChildren(
      svg("text", { x: ROW.left - 8, y: 17, "text-anchor": "end" }, "whole run"),
      svg("rect", { class: "track", x: ROW.left, y: 1, width: width - ROW.left - ROW.right, height: OVERVIEW }),
      svg("path", { class: "wait", d: this.waits.path }),
      svg("rect", { class: "view", x: from, y: 1, width: Math.max(3, to - from), height: OVERVIEW }));
  }

  waiting(whole, width) {
    // Few and wide columns: narrow ones would show the beat of steps against pixels.
    const columns = 90;
    const wide = (width - ROW.left - ROW.right) / columns;
    const column = (time) => (whole(time) - ROW.left) / wide;
    const mean = new Float64Array(columns);
    for (const row of this.data.ranks) {
      const shares = spread(row, row.begin.map((_, i) => i), column, 0, columns);
      shares[WAIT].forEach((share, c) => { mean[c] += Math.min(1, share) / this.data.ranks.length; });
    }
    let path = "";
    mean.forEach((share, c) => {
      if (share) path += box(ROW.left + c * wide, 1 + OVERVIEW * (1 - share), wide, OVERVIEW * share);
    });
    return path;
  }

  // ---- moving ----

  show(low, high) {
    const width = Math.min(Math.max(high - low, 100), this.data.end || 1);
    const begin = Math.max(0, Math.min(low, this.data.end - width));
    this.view = [begin, begin + width];
    this.render();
  }

  zoomBy(factor, at = (ROW.left + this.width - ROW.right) / 2) {
    const centre = this.x.invert(at);
    this.show(centre - (centre - this.view[0]) * factor, centre + (this.view[1] - centre) * factor);
  }

  move(part) {
    const by = (this.view[1] - this.view[0]) * part;
    this.show(this.view[0] + by, this.view[1] + by);
  }

  listen() {
    let held = null; // where the pointer was, and the view then
    const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown", (event) => {
      held = { at: at(event), view: this.view };
      this.svg.setPointerCapture(event.pointerId);
      this.svg.classList.add("held");
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!held) return this.tooltip(event);
      const by = ((held.at - at(event)) / (this.width - ROW.left - ROW.right)) * (held.view[1] - held.view[0]);
      hideTip();
      return this.show(held.view[0] + by, held.view[1] + by);
    });
    const release = () => { held = null; this.svg.classList.remove("held"); };
    for (const name of ["pointerup", "pointercancel"]) this.svg.addEventListener(name, release);
    this.svg.addEventListener("pointerleave", hideTip);
    this.svg.addEventListener("dblclick", () => this.show(...this.data.window));
    this.svg.addEventListener("wheel", (event) => {
      // A plain wheel scrolls the page, as everywhere.
      if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey) this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, at(event));
      else this.move(event.deltaX / this.width);
    }, { passive: false });
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.listenOverview();
  }

  listenOverview() {
    const centre = (event) => {
      if (!event.buttons) return;
      const time = this.whole.invert(event.clientX - this.overview.getBoundingClientRect().left);
      const half = (this.view[1] - this.view[0]) / 2;
      this.show(time - half, time + half);
    };
    this.overview.addEventListener("pointerdown", (event) => {
      this.overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    this.overview.addEventListener("pointermove", centre);
  }

  press(event) {
    const actions = {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      "+": () => this.zoomBy(0.6), "=": () => this.zoomBy(0.6), "-": () => this.zoomBy(1 / 0.6),
      0: () => this.show(...this.data.window), Home: () => this.show(0, this.data.end),
    };
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // ---- what is under the pointer ----

  tooltip(event) {
    const box_ = this.svg.getBoundingClientRect();
    const y = event.clientY - box_.top;
    const index = this.offsets.findIndex(({ top }) => y >= top - 2 && y < top + ROW.bar + ROW.lane + 4);
    const x = event.clientX - box_.left;
    if (index < 0 || x < ROW.left || x > this.width - ROW.right) return hideTip();
    const row = this.data.ranks[index];
    const found = this.seen(row, [this.x.invert(x - 1), this.x.invert(x + 1)]).slice(0, 6);
    const lines = found.map((i) => html("div", {}, this.told(row, i)));
    return showTip(event.clientX, event.clientY,
      html("b", {}, `worker ${row.rank}, ${show.seconds(this.x.invert(x) / 1e6)}`), ...lines);
  }

  told(row, i) {
    const level = spoken(this.data.levels[row.level[i]]);
    const what = [
      "computes", `sends${level ? ` over ${level}` : ""}`, `waits${level ? ` for ${level}` : ""}`,
    ][row.kind[i]];
    return `step ${show.plain(row.step[i])}: ${what}, ${show.seconds(row.length[i] / 1e6)}`;
  }
}

const box = (x, y, width, height) =>
  `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

// The share of every pixel column's time that each kind of span took.
function spread(row, chosen, x, from, to) {
  const columns = Math.max(1, Math.floor(to - from));
  const shares = KINDS.map(() => new Float64Array(columns));
  for (const i of chosen) {
    const begin = Math.max(0, x(row.begin[i]) - from);
    const end = Math.min(columns, x(row.begin[i] + row.length[i]) - from);
    for (let c = Math.floor(begin); c < end; c++) {
      shares[row.kind[i]][c] += Math.min(end, c + 1) - Math.max(begin, c);
    }
  }
  return shares;
}
