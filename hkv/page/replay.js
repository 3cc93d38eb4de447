// Pages of replays: one over time, several beside each other, and hit rates against sizes.

const TONES = [["held, not cached", 1], ["held and cached", 0.6], ["evictable", 0.28]];

/** What the pages of replays share: a board of charts, and a panel beside it. */
class Charted {
  constructor(data) {
    this.data = data;
    byId("title").textContent = byId("title").title = data.title;
    byId("finder").hidden = byId("modes").hidden = true;
    byId("stage").classList.add("charts");
    byId("tools").append(
      el("button", { onclick: () => this.board.window(this.board.axis.low, this.board.axis.high), title: "everything (0)" }, "all"),
      el("button", { onclick: () => this.zoom(), title: "zoom to the span that is chosen (z)" }, "zoom to span"),
      el("button", { onclick: () => this.theme(), title: "light or dark (t)", "aria-label": "light or dark" }, "◐"));
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "t") this.theme();
      if (event.key === "z") this.zoom();
      if (event.key === "0") this.board.window(this.board.axis.low, this.board.axis.high);
    });
    this.palette = new Palette(document.documentElement);
    byId("legend").append("Drag to choose a span, the wheel zooms, a double click shows everything; keys: ← → read, Shift ← → choose, z zoom to the span, 0 all, t light or dark.");
  }
  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.palette = new Palette(root);
    this.board.palette = null;
    this.board.paint();
    this.tell(this.board.span);
  }
  zoom() { if (this.board.span) this.board.window(...this.board.span); }
  colour(number) { return css(this.palette.groups[number % 8]); }
  cause(name) {
    const place = this.data.causes.indexOf(name);
    return name === "hit" ? this.colour(0) : name === "first use" ? this.palette.grid : this.colour(1 + ((place + 5) % 7));
  }
}

class ReplayPage extends Charted {
  constructor(data) {
    super(data);
    const { steps, step_ms: length } = data, seconds = (steps * length) / 1000;
    const [unit, name] = seconds > 7200 ? [3600, "h"] : seconds > 180 ? [60, "min"] : [1, "s"];
    const words = (step) => `${((step * length) / 1000 / unit).toLocaleString("en", { maximumFractionDigits: 2 })} ${name}`;
    const axis = { low: 0, high: Math.max(1, steps), words, unit: (unit * 1000) / length };
    this.words = words;
    this.order = [...data.requests.admitted.keys()].filter((row) => data.requests.admitted[row] >= 0).sort((a, b) => data.requests.admitted[a] - data.requests.admitted[b]);
    this.admitted = this.order.map((row) => data.requests.admitted[row]);
    this.board = new Board(byId("stage"), axis, [
      { title: "Hit rate", share: 1.1, top: 100, words: percent, layers: (...window) => this.hits(...window) },
      { title: "Prompt tokens, and why they were no hits", share: 1.1, layers: (...window) => this.causes(...window) },
      { title: "Blocks", share: 1.3, layers: (...window) => this.blocks(...window), legend: (layers) => this.kinds(layers), read: (layers, bin) => this.counts(layers, bin) },
      { title: "Requests", layers: (...window) => this.running(...window) },
    ], (span) => this.tell(span));
    this.tell(null);
  }
  hits(from, to, bins) {
    const at = this.data.time.step, prompts = binned(at, this.data.time.prompt_tokens, from, to, bins), hits = binned(at, this.data.time.hit_tokens, from, to, bins);
    let prompt = 0, hit = 0;
    for (let place = 0; place < at.length && at[place] < from; place++) { prompt += this.data.time.prompt_tokens[place]; hit += this.data.time.hit_tokens[place]; }
    const soFar = prompts.map((value, bin) => { prompt += value; hit += hits[bin]; return prompt ? (100 * hit) / prompt : -1; });
    return [{ name: "here", stack: true, alpha: 0.45, colour: this.colour(0), values: hits.map((value, bin) => (prompts[bin] ? (100 * value) / prompts[bin] : 0)) },
      { name: "so far", colour: this.palette.ink, values: soFar }];
  }
  causes(from, to, bins) {
    const coarse = Math.max(1, Math.floor(bins / 3)), { requests } = this.data;
    const spread = (values) => Float64Array.from({ length: bins }, (_, bin) => values[Math.min(coarse - 1, Math.floor((bin * coarse) / bins))]);
    return ["hit", ...this.data.causes].map((name, number) => {
      const values = spread(binned(this.admitted, this.order.map((row) => requests[name][row]), from, to, coarse));
      return { name: requests[name].some((value) => value > 0) ? name : "", stack: true, hatch: number - 1, colour: this.cause(name), values };
    });
  }
  blocks(from, to, bins) {
    const { occupancy, groups, time, totals } = this.data, layers = [];
    if (occupancy.step) {
      TONES.forEach(([name, alpha], tone) => groups.forEach((group, number) => {
        const of = (kind) => occupancy[`${kind}_${number}`];
        const values = Float64Array.from(of("held"), (value, at) => { const both = of("cached")[at] - of("evictable")[at]; return [value - both, both, of("evictable")[at]][tone]; });
        layers.push({ name: group, tone: name, number, hatch: number - 1, stack: true, alpha, colour: this.colour(number), values: held(occupancy.step, values, from, to, bins) });
      }));
    }
    layers.push({ name: "held at once (peak)", colour: this.palette.ink, width: 1.1, values: binned(time.step, time.in_use, from, to, bins, true) });
    layers.push({ name: `pool: ${totals.blocks.toLocaleString("en")}`, colour: this.palette.wrong, dash: [5, 4], values: new Float64Array(bins).fill(totals.blocks) });
    return layers;
  }
  /** Legend of the blocks: a colour a group, a tone each for held, cached and evictable. */
  kinds(layers) {
    const lines = layers.filter((layer) => !layer.stack);
    if (!this.data.occupancy.step) return lines;
    const tones = TONES.map(([name, alpha]) => ({ name, alpha, stack: true, colour: this.palette.faint }));
    return [...this.data.groups.map((name, number) => ({ name, stack: true, hatch: number - 1, colour: this.colour(number) })), ...tones, ...lines];
  }
  counts(layers, bin) {
    const stacked = layers.filter((layer) => layer.stack);
    const each = this.data.groups.map((name, number) => {
      const parts = stacked.filter((layer) => layer.number === number).map((layer) => counted(layer.values[bin]));
      return parts.length ? `${name} ${parts.join(" + ")}` : "";
    });
    return [...each, `peak ${counted((layers.find((layer) => !layer.stack) || { values: [] }).values[bin] || 0)}`];
  }
  running(from, to, bins) {
    const { time } = this.data;
    return [{ name: "running", colour: this.colour(2), values: binned(time.step, time.running, from, to, bins, true) },
      { name: "waiting", colour: this.colour(5), dash: [4, 3], values: binned(time.step, time.waiting, from, to, bins, true) },
      { name: "preemptions", colour: this.palette.wrong, stack: true, alpha: 0.6, values: binned(time.step, time.preemptions, from, to, bins) }];
  }
  tell(span) {
    const { data } = this, { totals } = data;
    const rows = [["requests", totals.requests], ["prompt tokens", totals.prompt_tokens], ["hit tokens", totals.hit_tokens], ["hit rate", percent(100 * totals.hit_rate, 1)],
      ["evictions", totals.evictions ?? "not counted"], ["preemptions", totals.preemptions], ["blocks in use, peak", `${counted(totals.blocks_in_use_peak)} of ${counted(totals.blocks)}`]];
    byId("panel").replaceChildren(
      this.chosen(span),
      el("section", {}, el("h2", {}, "The replay"), el("p", { class: "note" }, data.name),
        el("table", { class: "fields" }, rows.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, typeof value === "number" ? value.toLocaleString("en") : String(value))))),
        data.advice.length ? el("ul", {}, data.advice.map((text) => el("li", {}, text))) : ""),
      evictionGraph(this));
  }
  chosen(span) {
    if (!span) return el("section", {}, el("h2", {}, "A span of time"), el("p", { class: "note" }, "Choose one by dragging over a chart: its requests are listed here, with the reason why each one's hit ended."));
    const { data } = this, [from, to] = span;
    const inside = this.order.filter((row) => data.requests.admitted[row] >= from && data.requests.admitted[row] <= to);
    const missed = (row) => data.requests.prompt[row] - data.requests.hit[row];
    const listed = [...inside].sort((a, b) => missed(b) - missed(a)).slice(0, 100);
    const sum = (name) => inside.reduce((total, row) => total + data.requests[name][row], 0);
    const prompt = sum("prompt") || 1;
    const shares = ["hit", ...data.causes].map((name) => [name, sum(name)]).filter(([, tokens]) => tokens > 0);
    return el("section", {}, el("h2", {}, `${this.words(from)} to ${this.words(to)}`),
      el("p", {}, `${inside.length.toLocaleString("en")} requests admitted, ${counted(sum("prompt"))} prompt tokens`),
      el("table", { class: "counts" }, shares.map(([name, tokens]) => el("tr", {}, el("th", {}, name), el("td", {}, counted(tokens)), el("td", {}, percent((100 * tokens) / prompt, 1))))),
      el("h3", {}, inside.length > listed.length ? `The ${listed.length} that missed most` : "Those, by tokens missed"),
      el("table", { class: "listed" }, el("tr", {}, ...["request", "at", "prompt", "hit"].map((name) => el("th", {}, name))),
        listed.map((row) => [el("tr", {}, ...[String(data.requests.index[row]), this.words(data.requests.admitted[row]), counted(data.requests.prompt[row]), counted(data.requests.hit[row])].map((text) => el("td", {}, text))),
          el("tr", { class: "why" }, el("td", { colspan: "4" }, this.why(row)))])));
  }
  /** Causes of a request's misses in words. */
  why(row) {
    const { requests, causes, groups } = this.data;
    const found = causes.map((name) => [name, requests[name][row]]).filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]);
    return found.map(([name, tokens]) => {
      const before = requests.evicted_steps_before ? requests.evicted_steps_before[row] : -1;
      const by = name === "evicted" && before >= 0 ? `, ${this.words(before)} before, for ${groups[requests.evicted_for[row]]}` : "";
      return `${name} ${counted(tokens)}${by}`;
    }).join("; ") || "all of it was a hit";
  }
}

/** Whose growth took whose blocks: a graph of groups, and its numbers. */
function evictionGraph(page) {
  const { evicted, groups } = page.data;
  const heading = el("h2", {}, "Whose growth took whose blocks");
  if (!evicted.length) return el("section", {}, heading, el("p", { class: "note" }, "No eviction cost a hit, or the dialect does not tell."));
  const size = 280, canvas = el("canvas", { width: String(2 * size), height: String(2 * size * 0.8), role: "img", "aria-label": "eviction graph; the table below has its numbers" });
  canvas.className = "graph";
  const pen = canvas.getContext("2d"), most = Math.max(...evicted.map((each) => each.tokens));
  pen.scale(2, 2);
  const spot = (number) => {
    const angle = (2 * Math.PI * number) / groups.length - (groups.length > 2 ? Math.PI / 2 : Math.PI);
    const out = [Math.cos(angle), Math.sin(angle)], far = groups.length > 1 ? 1 : 0;
    return [size / 2 + 70 * far * out[0], size * 0.4 + 62 * far * out[1], ...out];
  };
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "center";
  for (const { group, taker, tokens } of evicted) {
    const [x, y, outX, outY] = spot(taker), [toX, toY] = spot(group);
    pen.strokeStyle = pen.fillStyle = page.colour(taker);
    pen.lineWidth = 1 + 6 * Math.sqrt(tokens / most);
    pen.beginPath();
    if (group === taker) { pen.arc(x + 25 * outX, y + 25 * outY, 14, 0, 7); pen.stroke(); continue; }
    const length = Math.hypot(toX - x, toY - y), [dx, dy] = [(toX - x) / length, (toY - y) / length];
    pen.moveTo(x + dx * 22 - dy * 5, y + dy * 22 + dx * 5);
    pen.lineTo(toX - dx * 30 - dy * 5, toY - dy * 30 + dx * 5);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(toX - dx * 21 - dy * 5, toY - dy * 21 + dx * 5);
    for (const turn of [-1, 1]) pen.lineTo(toX - dx * 33 - dy * (5 + turn * 6), toY - dy * 33 + dx * (5 + turn * 6));
    pen.fill();
  }
  groups.forEach((_, number) => {
    const [x, y] = spot(number);
    pen.fillStyle = page.colour(number);
    pen.beginPath();
    pen.arc(x, y, 18, 0, 7);
    pen.fill();
    pen.fillStyle = page.palette.ink;
    pen.fillText(String(number), x, y + 4);
  });
  return el("section", {}, heading, el("p", { class: "note" }, groups.map((name, number) => `${number}: ${name}`).join(", ")), canvas,
    el("table", { class: "taken" }, el("tr", {}, ...["blocks of", "taken by", "tokens missed", "requests", "before (median)"].map((name) => el("th", {}, name))),
      [...evicted].sort((a, b) => b.tokens - a.tokens).map((each) => el("tr", {}, ...[groups[each.group], groups[each.taker], counted(each.tokens), counted(each.requests), page.words(each.steps)].map((text) => el("td", {}, text))))));
}

/** Replays of one trace beside each other, request by request. */
class ComparePage extends Charted {
  constructor(data) {
    super(data);
    const count = data.requests.prompt.length;
    this.at = Float64Array.from({ length: count }, (_, row) => row + 1);
    const axis = { low: 1, high: Math.max(2, count), words: (value) => `request ${Math.round(value).toLocaleString("en")}`, unit: 1 };
    this.board = new Board(byId("stage"), axis, [
      { title: "Hit rate so far", share: 1.4, words: percent, layers: (...window) => this.soFar(...window) },
      { title: "Hit tokens more than the first replay's", words: counted, layers: (...window) => this.gained(...window) },
      { title: "Hit tokens less than the first replay's", words: counted, layers: (...window) => this.lost(...window) },
    ], (span) => this.tell(span));
    this.tell(null);
  }
  soFar(from, to, bins) {
    const { names, hits, requests } = this.data;
    return names.map((name, number) => {
      let prompt = 0, hit = 0;
      const values = new Float64Array(bins).fill(-1);
      for (let row = 0; row < this.at.length && this.at[row] <= to; row++) {
        if (hits[number][row] >= 0) { prompt += requests.prompt[row]; hit += hits[number][row]; }
        if (this.at[row] >= from) values[Math.min(bins - 1, Math.floor(((this.at[row] - from) * bins) / (to - from || 1)))] = prompt ? (100 * hit) / prompt : -1;
      }
      return { name: short(name, 40), colour: this.colour(number), dash: number % 2 ? [6, 3] : [], values: Array.from(values), positions: undefined };
    }).map((layer) => ({ ...layer, values: carried(layer.values) }));
  }
  apart(sign, from, to, bins) {
    const { names, hits } = this.data;
    return names.slice(1).map((name, number) => ({ name: short(name, 40), stack: true, hatch: number - 1, colour: this.colour(number + 1), alpha: 0.8,
      values: binned(this.at, Float64Array.from(hits[number + 1], (hit, row) => (hit >= 0 && hits[0][row] >= 0 ? Math.max(0, sign * (hit - hits[0][row])) : 0)), from, to, bins) }));
  }
  gained(...window) { return this.apart(1, ...window); }
  lost(...window) { return this.apart(-1, ...window); }
  tell(span) {
    const { names, hits, requests, totals, causes, by_cause: byCause } = this.data, [from, to] = span || [1, this.at.length];
    const rows = [...this.at.keys()].filter((row) => this.at[row] >= from && this.at[row] <= to);
    const changed = (row) => Math.max(...hits.map((each) => each[row])) - Math.min(...hits.map((each) => each[row]));
    const listed = rows.filter((row) => changed(row) > 0).sort((a, b) => changed(b) - changed(a)).slice(0, 60);
    const why = (row) => names.map((_, number) => causes.map((name) => [name, byCause[number][name][row]]).filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]).slice(0, 2).map(([name, tokens]) => `${name} ${counted(tokens)}`).join(", ") || "all hit");
    byId("panel").replaceChildren(
      el("section", {}, el("h2", {}, span ? `Requests ${Math.ceil(from)} to ${Math.floor(to)}` : "All requests"),
        el("p", { class: "note" }, listed.length ? "Those whose hits differ most; choose a span by dragging." : "No request's hit differs."),
        listed.length > 0 && el("table", {}, el("tr", {}, ...["request", "prompt", ...names.map((_, number) => `hit ${number + 1}`), "why hits ended"].map((name) => el("th", {}, name))),
          listed.map((row) => el("tr", {}, ...[String(row), counted(requests.prompt[row]), ...hits.map((each) => (each[row] < 0 ? "-" : counted(each[row])))].map((text) => el("td", {}, text)),
            el("td", {}, why(row).map((text, number) => el("p", {}, `${number + 1}: ${text}`))))))),
      el("section", {}, el("h2", {}, "The replays"), el("ol", {}, names.map((name) => el("li", {}, name))),
        el("table", { class: "counts" }, el("tr", {}, ...["", ...names.map((_, number) => String(number + 1))].map((name) => el("th", {}, name))),
          Object.entries(totals).map(([name, values]) => el("tr", {}, el("th", {}, name.replaceAll("_", " ")), values.map((value) => el("td", {}, name === "hit_rate" ? percent(100 * value, 1) : value < 0 ? "-" : counted(value))))))));
  }
}

/** Values with gaps filled by what came before. */
function carried(values) {
  let last = -1;
  return values.map((value) => (last = value >= 0 ? value : last));
}

/** Hit rates against the size of the pool or of the second tier, with bounds. */
class SweepPage extends Charted {
  constructor(data) {
    super(data);
    const sizes = data.lines.flatMap((line) => line.sizes).sort((a, b) => a - b), low = sizes[0], high = sizes[sizes.length - 1];
    const axis = { low: low === high ? low * 0.9 : low, high: low === high ? high * 1.1 : high, log: true, ticks: [...new Set(sizes)], words: (value) => `${value.toLocaleString("en", { maximumFractionDigits: data.size === "GiB" ? 2 : 0 })} ${data.size}` };
    this.board = new Board(byId("stage"), axis, [{ title: "Hit rate against size", words: percent, layers: () => this.rates(), legend: (layers) => this.kinds(layers) }], (span) => this.tell(span));
    this.tell(null);
  }
  rates() {
    return this.data.lines.flatMap((line, number) => {
      const made = [{ name: line.name || "as replayed", colour: this.colour(number), dots: true, positions: line.sizes, values: line.rates.map((rate) => 100 * rate), notes: line.notes }];
      if (line.optimal) made.push({ name: "at most, by any choice of what to keep", colour: this.colour(number), dash: [2, 3], positions: line.sizes, values: line.optimal.map((rate) => 100 * rate) });
      if (line.infinite !== null) made.push({ name: "a pool that evicts nothing", colour: this.colour(number), dash: [8, 4], positions: [line.sizes[0], line.sizes[line.sizes.length - 1]], values: [100 * line.infinite, 100 * line.infinite] });
      return made;
    });
  }
  /** Legend: a colour a line, and what dots and dashes are, once for all of them. */
  kinds(layers) {
    const bounds = new Map(layers.filter((layer) => layer.dash).map((layer) => [layer.name, { ...layer, colour: this.palette.faint }]));
    return [...layers.filter((layer) => !layer.dash), ...bounds.values()];
  }
  tell(span) {
    const inside = (size) => !span || (size >= span[0] && size <= span[1]);
    byId("panel").replaceChildren(...this.data.lines.map((line) => el("section", {}, el("h2", {}, line.name || "Sweep"), line.resolved && el("p", { class: "note" }, line.resolved),
      line.said.length ? el("ul", {}, line.said.map((text) => el("li", {}, text))) : "",
      el("table", { class: "counts" }, el("tr", {}, ...[this.data.size, "hit rate", ...(line.optimal ? ["at most", "gap"] : []), "evictions", "refused"].map((name) => el("th", {}, name))),
        line.sizes.map((size, at) => [size, at]).filter(([size]) => inside(size)).map(([size, at]) => el("tr", {}, el("th", {}, this.board.axis.words(size).split(" ")[0]), ...[percent(100 * line.rates[at], 1),
          ...(line.optimal ? [percent(100 * line.optimal[at], 1), percent(100 * (line.optimal[at] - line.rates[at]), 1)] : []), line.evictions[at] < 0 ? "-" : counted(line.evictions[at]), counted(line.refused[at])].map((text) => el("td", {}, text))))),
      line.sizes.filter(inside).length ? line.sizes.map((size, at) => [size, at]).filter(([size]) => inside(size)).slice(0, 12).map(([size, at]) => el("details", {}, el("summary", {}, `${this.board.axis.words(size)}: options`), copied(line.commands[at]))) : "")));
  }
}
