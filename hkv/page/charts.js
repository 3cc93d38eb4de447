// Charts of a replay: panels over one axis, which move together, are read under the pointer, and give a span.
//
// What is drawn is summed into bins of three pixels when it is drawn, from columns as long as the replay has steps or
// requests: zooming in shows what a plot of fixed bins has averaged away.

const MARGIN = { left: 62, right: 14, bottom: 22 };
const LEGEND = 16; // height of a line of a legend

/** Panels, one below the other. `axis`: lowest and highest position, words for a position, `log` for a logarithmic one. */
class Board {
  constructor(box, axis, panels, tell) {
    Object.assign(this, { box, axis, panels, tell });
    this.from = axis.low;
    this.to = axis.high;
    this.span = null;
    this.charts = panels.map((panel) => this.chart(panel));
    box.replaceChildren(...this.charts.map((chart) => chart.figure));
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(box);
    this.layout();
  }
  chart(panel) {
    const base = el("canvas"), over = el("canvas", { tabindex: "0", role: "application", "aria-label": `${panel.title}; arrow keys move, Shift selects` });
    const read = el("span", { class: "read" });
    const figure = el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, panel.title), " ", read), el("div", { class: "sheet" }, base, over));
    const chart = { panel, base, over, read, figure };
    over.addEventListener("pointermove", (event) => this.moved(event));
    over.addEventListener("pointerleave", () => { if (!this.grip) { this.cursor = null; this.paintOver(); } });
    over.addEventListener("pointerdown", (event) => {
      over.setPointerCapture(event.pointerId);
      this.grip = this.at(event);
    });
    over.addEventListener("pointerup", (event) => this.released(event));
    over.addEventListener("dblclick", () => this.window(this.axis.low, this.axis.high));
    over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    over.addEventListener("keydown", (event) => this.key(event));
    return chart;
  }
  layout() {
    const width = this.box.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    const shares = this.panels.reduce((sum, panel) => sum + (panel.share || 1), 0);
    // On a narrow screen the box is as high as its charts, which therefore cannot be as high as the box.
    const narrow = matchMedia("(max-width: 760px)").matches, least = (narrow ? 170 : 130) * this.panels.length;
    const height = Math.max(narrow ? innerHeight * 0.55 : this.box.clientHeight - 26 * this.panels.length, least);
    this.width = width;
    for (const { panel, base, over } of this.charts) {
      const high = Math.floor((height * (panel.share || 1)) / shares);
      for (const canvas of [base, over]) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(high * ratio);
        canvas.style.width = `${width}px`;
        canvas.style.height = `${high}px`;
        canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      base.high = high;
    }
    this.paint();
  }
  scale(value) { return this.axis.log ? Math.log(Math.max(value, 1e-9)) : value; }
  /** Position on the screen. */
  x(value) {
    const [from, to] = [this.scale(this.from), this.scale(this.to)];
    return MARGIN.left + ((this.scale(value) - from) / (to - from || 1)) * (this.width - MARGIN.left - MARGIN.right);
  }
  at(event) {
    const share = (event.offsetX - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    const [from, to] = [this.scale(this.from), this.scale(this.to)], value = from + Math.max(0, Math.min(1, share)) * (to - from);
    return this.axis.log ? Math.exp(value) : value;
  }
  moved(event) {
    this.cursor = this.at(event);
    if (this.grip) this.span = [this.grip, this.cursor].sort((a, b) => a - b);
    this.paintOver();
  }
  released(event) {
    const grip = this.grip, end = this.at(event);
    this.grip = null;
    if (grip === null || grip === undefined) return;
    this.select(Math.abs(this.x(end) - this.x(grip)) < 4 ? null : [grip, end].sort((a, b) => a - b));
  }
  select(span) {
    this.span = span;
    this.paintOver();
    this.tell(span);
  }
  window(from, to) {
    const least = (this.axis.high - this.axis.low) / 20000, wide = Math.max(to - from, least);
    this.from = Math.max(this.axis.low, Math.min(from, this.axis.high - wide));
    this.to = Math.min(this.axis.high, this.from + wide);
    this.paint();
  }
  wheel(event) {
    event.preventDefault();
    if (this.axis.log) return;
    const here = this.at(event), factor = event.shiftKey ? 1 : Math.exp(event.deltaY / 300), moved = event.shiftKey ? ((this.to - this.from) * event.deltaY) / 800 : 0;
    this.window(here + (this.from - here) * factor + moved, here + (this.to - here) * factor + moved);
  }
  key(event) {
    const step = (this.to - this.from) / 60, direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.select(null);
    else if (event.key === "+") this.wheelAt(0.7);
    else if (event.key === "-") this.wheelAt(1.4);
    else if (event.key === "0") this.window(this.axis.low, this.axis.high);
    else if (direction) {
      const before = this.cursor ?? this.from;
      this.cursor = Math.max(this.from, Math.min(this.to, before + direction * step));
      if (event.shiftKey) this.select([Math.min(this.span ? this.span[0] : before, this.cursor), Math.max(this.span ? this.span[1] : before, this.cursor)]);
      this.paintOver();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
  wheelAt(factor) {
    const here = this.cursor ?? (this.from + this.to) / 2;
    this.window(here + (this.from - here) * factor, here + (this.to - here) * factor);
  }
  paint() {
    this.palette ??= new Palette(document.documentElement);
    this.bins = Math.max(1, Math.floor((this.width - MARGIN.left - MARGIN.right) / 3));
    for (const chart of this.charts) this.paintChart(chart);
    this.paintOver();
  }
  paintChart(chart) {
    const { base, panel } = chart, pen = base.getContext("2d"), { palette, width } = this, high = base.high;
    pen.fillStyle = palette.ground;
    pen.fillRect(0, 0, width, high);
    const layers = (chart.layers = panel.layers(this.from, this.to, this.bins));
    const stacked = sums(layers.filter((layer) => layer.stack));
    const most = Math.max(panel.top || 0, ...stacked, ...layers.filter((layer) => !layer.stack).flatMap((layer) => [extreme(layer.values)]), 1) * (panel.top ? 1 : 1.06);
    const y = (chart.y = (value) => high - MARGIN.bottom - (value / most) * (high - MARGIN.bottom - chart.top));
    this.legend(pen, chart);
    this.axes(pen, chart, most, y);
    const bottom = new Float64Array(this.bins);
    const wide = (width - MARGIN.left - MARGIN.right) / this.bins;
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left - 4, 0, width - MARGIN.left - MARGIN.right + 8, high);
    pen.clip();
    for (const layer of layers) {
      pen.fillStyle = pen.strokeStyle = layer.colour;
      pen.globalAlpha = layer.alpha ?? 1;
      if (layer.stack) {
        for (let bin = 0; bin < this.bins; bin++) {
          const value = layer.values[bin] || 0, x = Math.round(MARGIN.left + bin * wide);
          if (value > 0) this.fill(pen, layer, x, y(bottom[bin] + value), Math.round(MARGIN.left + (bin + 1) * wide) - x, y(bottom[bin]) - y(bottom[bin] + value));
          bottom[bin] += value;
        }
      } else {
        pen.lineWidth = layer.width || 1.6;
        pen.setLineDash(layer.dash || []);
        pen.beginPath();
        let open = false;
        layer.values.forEach((value, place) => {
          if (!(value >= 0)) { open = false; return; }
          const x = layer.positions ? this.x(layer.positions[place]) : MARGIN.left + (place + 0.5) * wide;
          if (open) pen.lineTo(x, y(value)); else pen.moveTo(x, y(value));
          open = true;
          if (layer.dots) { pen.moveTo(x + 3, y(value)); pen.arc(x, y(value), 3, 0, 7); pen.moveTo(x, y(value)); }
        });
        pen.stroke();
        pen.setLineDash([]);
      }
      pen.globalAlpha = 1;
    }
    pen.restore();
  }
  /** Draws the legend over as many lines as it takes; the chart begins below it. */
  legend(pen, chart) {
    const { palette, width } = this, { panel, layers } = chart, start = MARGIN.left + 4;
    let x = start, y = 12;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const layer of panel.legend ? panel.legend(layers) : layers.filter((each) => each.name)) {
      const room = pen.measureText(layer.name).width + 30;
      if (x > start && x + room > width) { x = start; y += LEGEND; }
      pen.fillStyle = pen.strokeStyle = layer.colour;
      pen.globalAlpha = layer.alpha ?? 1;
      if (layer.stack) this.fill(pen, layer, x, y - 5, 12, 10);
      else { pen.lineWidth = 2; pen.setLineDash(layer.dash || []); pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x + 16, y); pen.stroke(); pen.setLineDash([]); }
      pen.globalAlpha = 1;
      pen.fillStyle = palette.ink;
      pen.fillText(layer.name, x + 20, y);
      x += room;
    }
    chart.top = y + 12;
  }
  /** A bar of a layer, hatched where it has a number, so that colours need not be told apart. */
  fill(pen, layer, ...box) {
    pen.fillStyle = layer.colour;
    pen.fillRect(...box);
    if (!(layer.hatch >= 0)) return;
    pen.fillStyle = this.palette.pattern(pen, layer.hatch);
    pen.fillRect(...box);
  }
  axes(pen, chart, most, y) {
    const { palette, width } = this, high = chart.base.high;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const value of ticks(0, most, Math.max(2, Math.floor(high / 50)))) {
      pen.fillStyle = palette.grid;
      pen.fillRect(MARGIN.left, y(value), width - MARGIN.left - MARGIN.right, 0.7);
      pen.fillStyle = palette.faint;
      pen.fillText(chart.panel.words ? chart.panel.words(value) : counted(value), MARGIN.left - 5, y(value));
    }
    pen.textAlign = "center";
    const marks = this.axis.ticks ? this.axis.ticks.filter((value, at, all) => !at || this.x(value) - this.x(all[at - 1]) > 46 || at === all.length - 1) : ticks(this.from, this.to, Math.max(2, Math.floor(width / 110)), this.axis.unit);
    for (const value of marks) {
      pen.fillStyle = palette.grid;
      pen.fillRect(this.x(value), chart.top, 0.7, high - chart.top - MARGIN.bottom);
      pen.fillStyle = palette.faint;
      const last = this.x(value) > width - 50;
      pen.textAlign = last ? "right" : "center";
      pen.fillText(this.axis.words(value), last ? width - 4 : this.x(value), high - 10);
    }
    pen.textAlign = "left";
  }
  paintOver() {
    for (const chart of this.charts) {
      const { over, base, read, layers } = chart, pen = over.getContext("2d");
      pen.clearRect(0, 0, this.width, base.high);
      if (this.span) {
        pen.fillStyle = this.palette.choice;
        pen.globalAlpha = 0.16;
        pen.fillRect(this.x(this.span[0]), 0, this.x(this.span[1]) - this.x(this.span[0]), base.high);
        pen.globalAlpha = 1;
      }
      read.textContent = "";
      if (this.cursor === null || this.cursor === undefined) continue;
      pen.fillStyle = this.palette.choice;
      pen.fillRect(this.x(this.cursor), chart.top - 4, 1, base.high - chart.top);
      const bin = Math.min(this.bins - 1, Math.max(0, Math.floor(((this.x(this.cursor) - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * this.bins)));
      const words = chart.panel.words || counted;
      const said = chart.panel.read ? chart.panel.read(layers, bin) : layers.filter((layer) => layer.name).map((layer) => {
        const place = layer.positions ? nearest(layer.positions, this.cursor) : Math.min(bin, layer.values.length - 1);
        const value = layer.values[place];
        return value >= 0 && (value > 0 || !layer.stack) ? `${layer.name} ${words(value)}${layer.notes && layer.notes[place] ? ` (${layer.notes[place]})` : ""}` : "";
      });
      read.textContent = `${this.axis.words(this.cursor)}: ${said.filter(Boolean).join(", ") || "nothing"}`;
    }
  }
}

function nearest(positions, value) {
  let best = 0;
  positions.forEach((each, at) => { if (Math.abs(Math.log(each / value)) < Math.abs(Math.log(positions[best] / value))) best = at; });
  return best;
}

function sums(layers) {
  const length = Math.max(0, ...layers.map((layer) => layer.values.length)), found = new Float64Array(length);
  for (const layer of layers) for (let at = 0; at < length; at++) found[at] += layer.values[at] || 0;
  return [extreme(found)];
}

function extreme(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

/** Round positions within [low, high], about `count` of them, in multiples of `unit`. */
function ticks(low, high, count, unit = 1) {
  const raw = (high - low) / count / unit, power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = ([1, 2, 5, 10].find((each) => each * power >= raw) || 10) * power * unit, found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
}

function counted(value) {
  if (value >= 1e6) return `${(value / 1e6).toLocaleString("en", { maximumFractionDigits: 2 })}M`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
}

function percent(value, digits = 0) { return `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: 1 })} %`; }

/** Sums, or the largest, of values in bins over [from, to]; `at` is sorted. */
function binned(at, values, from, to, bins, largest = false) {
  const found = new Float64Array(bins), scale = bins / (to - from || 1);
  for (let place = upper(at, from - 1e-9); place < at.length && at[place] <= to; place++) {
    const bin = Math.min(bins - 1, Math.floor((at[place] - from) * scale));
    if (largest) found[bin] = Math.max(found[bin], values[place]); else found[bin] += values[place];
  }
  return found;
}

/** Values of samples, each holding until the next. */
function held(at, values, from, to, bins) {
  const found = new Float64Array(bins);
  for (let bin = 0; bin < bins; bin++) {
    const place = upper(at, from + ((bin + 0.5) * (to - from)) / bins) - 1;
    found[bin] = place < 0 ? 0 : values[place];
  }
  return found;
}
