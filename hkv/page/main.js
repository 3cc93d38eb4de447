// The page: cases, keys, search, addresses, theme.

const byId = (id) => document.getElementById(id);

const HELP = [
  ["← →", "operation before, after (Shift: ten)"], ["↑ ↓", "block above, below (Shift: ten)"],
  ["n, p", "next, previous difference or mark"], ["f", "first difference"],
  ["1 2 3", "rows: blocks, requests' rows, free queue"], ["+ −", "zoom; Ctrl and wheel, or a double click, zoom at the pointer"],
  ["0", "everything"], ["Home, End", "first, last operation"], ["/", "search"], ["s", "other side"],
  ["t", "light, dark"], ["h, ?", "this help"], ["Esc", "leave search or help"],
];

class Page {
  constructor(data) {
    this.data = data;
    this.cases = data.cases.map((given) => new Case(given));
    this.view = new View(byId("stage"), (choice) => this.chosen(choice));
    this.panel = new Panel(byId("panel"), (choice) => this.view.choose(choice, true));
    byId("title").textContent = byId("title").title = data.title;
    const list = byId("cases");
    list.hidden = this.cases.length < 2;
    this.cases.forEach((each, at) => list.append(el("option", { value: String(at) }, each.name)));
    list.addEventListener("change", () => this.open(Number(list.value)));
    byId("modes").append(...MODES.map(([name], at) => el("button", { role: "radio", "aria-checked": "false", onclick: () => this.mode(at) }, name)));
    byId("tools").append(
      el("button", { onclick: () => this.stop(-1), title: "previous difference (p)", "aria-label": "previous difference" }, "◀ diff"),
      el("button", { onclick: () => this.stop(1), title: "next difference (n)", "aria-label": "next difference" }, "diff ▶"),
      el("button", { onclick: () => this.view.zoom(1.5), "aria-label": "zoom in" }, "+"),
      el("button", { onclick: () => this.view.zoom(1 / 1.5), "aria-label": "zoom out" }, "−"),
      el("button", { onclick: () => this.view.fit(), title: "everything (0)" }, "all"),
      el("button", { onclick: () => this.theme(), title: "light or dark (t)", "aria-label": "light or dark" }, "◐"),
      el("button", { onclick: () => this.help(), title: "help (h)", "aria-label": "help" }, "?"));
    byId("search").addEventListener("input", () => this.search());
    byId("search").addEventListener("keydown", (event) => this.searchKey(event));
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => { if (location.hash !== this.written) this.go(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    this.current = -1;
    if (this.cases.length) this.go();
    else byId("stage").append(el("p", { class: "nothing" }, data.live ? "Nothing was observed yet." : "Nothing to show: no difference, and no invariant broken."));
  }
  /** Takes newer data; the choice stays, or stays at the end where it was there. */
  update(data) {
    const before = this.current < 0 ? null : this.cases[this.current], choice = before && { ...this.view.choice };
    this.cases = data.cases.map((given) => new Case(given));
    if (!this.cases.length) return;
    byId("stage").querySelector(".nothing")?.remove();
    const list = byId("cases");
    list.hidden = this.cases.length < 2;
    list.replaceChildren(...this.cases.map((each, at) => el("option", { value: String(at) }, each.name)));
    const same = before ? this.cases.findIndex((each) => each.name === before.name) : -1;
    if (same < 0) {
      const wrong = this.cases.findIndex((each) => each.marks.length);
      this.open(wrong < 0 ? this.cases.length - 1 : wrong);
      if (wrong < 0) this.view.choose({ at: this.cases[this.current].count }, true);
      return;
    }
    const ended = choice.at === before.count, now = this.cases[same];
    this.current = same;
    list.value = String(same);
    this.view.frame.x = Math.max(0, this.view.frame.x + before.first - now.first);
    this.view.show(now, true);
    this.view.choose({ ...choice, at: ended ? now.count : now.atLine(before.lineAt(choice.at)) }, ended);
  }
  /** Cases in which something differs or is broken. */
  get broken() { return this.cases.filter((each) => each.marks.some((mark) => mark.kind !== "line")).length; }
  /** Verdict of a live page on what was observed so far. */
  verdict() {
    if (!this.cases.length) return "live: nothing was observed yet";
    return this.broken ? `live: ${this.broken} broken` : "live: nothing broken so far";
  }
  open(number) {
    this.current = number;
    byId("cases").value = String(number);
    this.view.found = null;
    this.view.show(this.cases[number]);
    this.mode(this.view.mode);
    const shown = this.cases[number], [mark] = shown.marks, at = mark ? Math.min(shown.count, shown.atLine(mark.line)) : 0;
    this.view.choose({ at, block: at ? shown.culprit(at) : -1, side: 0 });
    if (at) this.view.near();
    this.legend();
  }
  /** Opens what the address names: `#case=0&op=31&block=5&side=1&rows=requests`. */
  go() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const number = Math.min(this.cases.length - 1, Math.max(0, Number(asked.get("case")) || 0));
    if (number !== this.current) this.open(number);
    const mode = MODES.findIndex(([name]) => name === asked.get("rows"));
    if (mode >= 0) this.mode(mode);
    const choice = {};
    if (asked.has("op")) choice.at = this.cases[number].atLine(Number(asked.get("op")) || 1);
    if (asked.has("block")) choice.block = this.cases[number].block(asked.get("block"));
    if (asked.has("side")) choice.side = Math.max(0, Math.min(this.cases[number].sides.length - 1, Number(asked.get("side")) || 0));
    if (Object.keys(choice).length) this.view.choose(choice, true);
  }
  chosen(choice) {
    const shown = this.cases[this.current];
    this.panel.show(shown, choice);
    const address = new URLSearchParams();
    if (this.cases.length > 1) address.set("case", String(this.current));
    address.set("op", String(shown.lineAt(choice.at)));
    if (choice.block >= 0) address.set("block", shown.nameOf(choice.block));
    if (choice.side) address.set("side", String(choice.side));
    if (this.view.mode) address.set("rows", MODES[this.view.mode][0]);
    this.written = `#${address}`;
    try { history.replaceState(null, "", this.written); } catch { location.replace(this.written); }
    const side = shown.sides[choice.side];
    const cell = choice.block >= 0 && side.drawn ? `, block ${shown.nameOf(choice.block)}: ${shown.status(side, side.cell(choice.block, choice.at))}` : "";
    byId("spoken").textContent = `line ${shown.lineAt(choice.at)} ${choice.at ? shown.words(choice.at - 1) : "start"}${cell}`;
  }
  mode(mode) {
    this.view.setMode(mode);
    [...byId("modes").children].forEach((button, at) => button.setAttribute("aria-checked", String(at === mode)));
    if (this.current >= 0 && this.written) this.chosen(this.view.choice);
  }
  stop(direction) {
    if (!this.view.stop(direction)) byId("spoken").textContent = "no more differences";
  }
  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.recolour();
  }
  recolour() {
    this.view.palette = null;
    if (this.cases.length) this.view.repaint();
    this.legend();
  }
  help() {
    const box = byId("help");
    box.replaceChildren(el("h2", {}, "Keys"), el("table", {}, HELP.map(([keys, what]) => el("tr", {}, el("th", {}, keys), el("td", {}, what)))),
      el("p", {}, "A column is an operation, a row a block: the cell is the block after the operation. Drag to move. Click a column's name, or a cell."),
      el("button", { onclick: () => box.close() }, "close"));
    box.showModal();
  }
  key(event) {
    if (!this.cases.length || event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (byId("help").open) return;
    const many = event.shiftKey ? 10 : 1, { view } = this;
    const keys = {
      ArrowLeft: () => view.step(-many, 0), ArrowRight: () => view.step(many, 0), ArrowUp: () => view.step(0, -many), ArrowDown: () => view.step(0, many),
      n: () => this.stop(1), p: () => this.stop(-1), f: () => { view.choose({ at: 0 }); this.stop(1); },
      1: () => this.mode(0), 2: () => this.mode(1), 3: () => this.mode(2), "+": () => view.zoom(1.5, ...this.middle()), "=": () => view.zoom(1.5, ...this.middle()), "-": () => view.zoom(1 / 1.5, ...this.middle()),
      0: () => view.fit(), Home: () => view.choose({ at: 0 }, true), End: () => view.choose({ at: view.shown.count }, true),
      "/": () => byId("search").focus(), s: () => view.choose({ side: (view.choice.side + 1) % view.shown.sides.length }),
      t: () => this.theme(), h: () => this.help(), "?": () => this.help(), Escape: () => { view.found = null; view.paintOver(); },
    };
    const does = keys[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
  /** Where the choice is drawn, for zooming at it. */
  middle() {
    const { view } = this, row = Math.max(0, view.chosenRow(view.shown.sides[view.choice.side]));
    return [GUTTER + (view.choice.at - view.frame.x + 0.5) * view.frame.sx, view.top + (row - view.frame.y) * view.frame.sy];
  }
  searchKey(event) {
    const items = [...byId("found").children], at = items.findIndex((item) => item.ariaSelected === "true");
    if (event.key === "Escape") { byId("search").value = ""; this.search(); byId("search").blur(); }
    else if (event.key === "Enter") (items[Math.max(0, at)] || { click() {} }).click();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const next = Math.max(0, Math.min(items.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)));
      items.forEach((item, place) => { item.ariaSelected = String(place === next); });
    }
  }
  search() {
    const text = byId("search").value.trim(), list = byId("found");
    const found = text ? searched(this.cases[this.current], text) : [];
    list.hidden = !text;
    list.replaceChildren(...(found.length || !text ? found : [{ words: "nothing found" }]).map(({ words, choice, spans }) => el("li", {
      role: "option", onclick: () => {
        if (!choice) return;
        this.view.found = spans || null;
        list.hidden = true;
        this.view.choose(choice, true);
      } }, words)));
  }
  legend() {
    if (!this.cases.length) return;
    const palette = new Palette(document.documentElement), shown = this.cases[this.current];
    const patch = (paint, words) => {
      const canvas = el("canvas", { width: "52", height: "32" }), pen = canvas.getContext("2d");
      pen.scale(2, 2);
      paint(pen);
      return el("span", { class: "key" }, canvas, words);
    };
    const fill = (status, group, hatch) => (pen) => {
      pen.fillStyle = css(palette.of(status, group)); pen.fillRect(0, 0, 26, 16);
      if (hatch >= 0) { pen.fillStyle = palette.pattern(pen, hatch); pen.fillRect(0, 0, 26, 16); }
      if (status & CACHED) { pen.fillStyle = palette.key; pen.fillRect(0, 14, 26, 2); }
      if (!status) framed(pen, palette, 2, 2, 22, 12);
    };
    const unlike = (pen) => { fill(HELD, 0, -1)(pen); framed(pen, palette, 2, 2, 22, 12, [3, 2]); };
    const flag = (had, has) => (pen) => {
      pen.fillStyle = css(palette.of(has ? CACHED : FREE, 0)); pen.fillRect(13, 0, 13, 16);
      const side = { cell: () => ({ key: had ? 0 : -1 }) };
      keyEdge(pen, palette, side, 0, { at: 1, key: has ? 1 : -1 }, 13, 0, 16);
    };
    byId("legend").replaceChildren(
      ...shown.groups.slice(0, 8).map((group, at) => patch(fill(HELD, at, -1), `${at} ${group.kind}:${group.size}`)),
      patch(fill(HELD, 0, 0), "held, hatched by request"), patch(fill(HELD | CACHED, 0, 1), "held and cached"), patch(fill(CACHED, 0, -1), "cached, evictable"),
      patch(fill(FREE, 0, -1), "free"), patch(fill(0, 0, -1), "lost, or free while held"),
      ...(shown.sides.length > 1 ? [patch(unlike, "the sides differ")] : []), patch(flag(false, true), "key comes"), patch(flag(true, false), "key goes"));
  }
}

/** Results of a search: an operation, a block, requests, keys. */
function searched(shown, text) {
  const found = [], side = shown.sides[shown.sides.length - 1];
  const line = /^(?:line|op)?\s*:?\s*(\d+)$/i.exec(text), named = /^b(?:lock)?\s*([\d.]+)$/i.exec(text);
  if (named || (line && !/^(line|op|:)/i.test(text))) {
    const block = shown.block(named ? named[1] : line[1]);
    if (block >= 0) found.push({ words: `block ${shown.nameOf(block)}`, choice: { block } });
  }
  if (line && Number(line[1]) >= shown.lineAt(0) && Number(line[1]) <= shown.lineAt(shown.count)) {
    const at = shown.atLine(Number(line[1]));
    found.push({ words: `line ${line[1]}: ${at ? shown.words(at - 1) : "configuration"}`, choice: { at } });
  }
  const ids = [...new Set(shown.subjects.filter((id) => id && id.toLowerCase().includes(text.toLowerCase())))].sort((a, b) => a.length - b.length);
  for (const id of ids.slice(0, 8)) {
    const at = shown.subjects.indexOf(id) + 1, count = shown.subjects.filter((each) => each === id).length;
    found.push({ words: `request ${id}: ${count} operations, from line ${shown.lineAt(at)}`, choice: { at }, spans: spansOf((each) => (cell) => each.held(cell.holders).some(([one]) => one === id)) });
  }
  if (/^[0-9a-f]{3,}$/i.test(text)) {
    side.keys.forEach((key, number) => {
      if (!key || !key.startsWith(text.toLowerCase()) || found.length > 14) return;
      const row = side.changes.key.indexOf(number);
      if (row < 0) return;
      const block = side.changes.block[row], at = side.changes.at[row];
      found.push({ words: `key ${key}: block ${shown.nameOf(block)}, line ${shown.lineAt(at)}`, choice: { at, block },
        spans: spansOf((each) => { const same = each.keys.indexOf(key); return (cell) => cell.key === same && same >= 0; }) });
    });
  }
  return found;
}

/** Spans of blocks, [block, from, to], during which something holds of their cells; found once a side. */
function spansOf(holding) {
  const known = new Map();
  return (side) => {
    if (known.has(side)) return known.get(side);
    const found = [], holds = holding(side);
    for (let block = 0; block < side.blocks; block++) {
      for (let place = side.starts[block], from = -1; place <= side.starts[block + 1]; place++) {
        const there = place < side.starts[block + 1] && holds(side.change(place));
        const when = place < side.starts[block + 1] ? side.when[place] : Infinity;
        if (there && from < 0) from = when;
        if (!there && from >= 0) { found.push([block, from, Math.min(when - 1, 1e9)]); from = -1; }
      }
    }
    known.set(side, found);
    return found;
  };
}

/** Asks the server that the page came from for what is new, once a second while somebody looks. */
async function follow(page, address) {
  let known = 0;
  const badge = el("span", { class: "live", role: "status" }, page.verdict());
  byId("tools").prepend(badge);
  for (;;) {
    if (!document.hidden) {
      try {
        const answer = await fetch(`${address}?since=${known}`);
        if (answer.status === 200) {
          page.update(await unpack(new Uint8Array(await answer.arrayBuffer())));
          known = Number(answer.headers.get("X-HKV-Version"));
        }
        badge.textContent = page.verdict();
        badge.classList.toggle("wrong", page.broken > 0);
      } catch {
        badge.textContent = `ended: ${page.verdict()}`;
        return;
      }
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function start() {
  const text = byId("data").textContent, bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  byId("data").remove();
  const data = await unpack(bytes), made = { replay: ReplayPage, compare: ComparePage, sweep: SweepPage };
  window.hkv = new (made[data.kind] || Page)(data);
  if (document.body.dataset.live) follow(window.hkv, document.body.dataset.live);
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  document.body.dataset.ready = "no";
  byId("stage").textContent = `This page cannot be drawn: ${error.message}`;
  throw error;
});
