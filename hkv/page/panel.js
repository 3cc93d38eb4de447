// Details beside the stage: the case, an operation, a block. All text is set as text.

/** An element; children may be elements, texts, or nothing. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== "" && child !== false));
  return made;
}

const NEAREST = 40; // changes of a block that are listed, around the operation

class Panel {
  constructor(box, go) {
    this.box = box;
    this.go = go;
  }
  /** Shows a choice of a case. */
  show(shown, choice) {
    this.shown = shown;
    const scrolled = this.box.scrollTop;
    this.box.replaceChildren(
      this.ofCase(), this.ofOperation(choice), ...(choice.block >= 0 ? [this.ofBlock(choice)] : []), this.ofMoment(choice), this.repeat());
    this.box.scrollTop = scrolled;
  }
  line(at, text = `line ${this.shown.lineAt(at)}`) {
    return el("button", { class: "link", onclick: () => this.go({ at }) }, text);
  }
  blockLink(block, at) {
    return el("button", { class: "link", onclick: () => this.go({ block, ...(at === undefined ? {} : { at }) }) }, `block ${this.shown.nameOf(block)}`);
  }
  ofCase() {
    const { shown } = this;
    const marks = shown.marks.map((mark) => el("div", { class: `mark ${mark.kind}` },
      this.line(shown.atLine(mark.line)), " ", el("b", {}, mark.title), ...mark.text.map((text) => el("p", {}, text))));
    const every = shown.every > 1
      ? el("p", { class: "note" }, `Blocks were looked at after every ${shown.every} operations: what happened in between shows at the next look.`) : "";
    return el("section", {}, el("h2", {}, shown.name),
      shown.headline && el("p", { class: "headline" }, shown.headline),
      el("p", { class: "note" }, `${shown.dialect}; ${shown.summary}; ${shown.count.toLocaleString("en")} operations`), every, marks);
  }
  ofOperation({ at }) {
    const { shown } = this;
    if (!at) return el("section", {}, el("h2", {}, shown.first ? `After line ${shown.lineAt(0)}; the configuration` : "Line 1: the configuration"), fields(shown.header));
    const index = at - 1, differs = shown.differs[at];
    const answers = shown.sides.map((side) => [side.name, side.answers.line(index)]).filter(([, text]) => text);
    const rows = answers.map(([name, text]) => el("tr", {}, el("th", {}, name), el("td", {}, el("code", {}, differs ? marked(text, answers) : text))));
    const changed = this.changed(at);
    return el("section", {}, el("h2", {}, `Line ${shown.lineAt(at)}: ${shown.words(index)}`),
      el("p", {}, el("code", {}, shown.words(index, true))),
      rows.length ? el("table", { class: differs ? "answers differs" : "answers" }, el("caption", {}, differs ? "the answers differ" : "answer"), rows) : "",
      changed, this.account(shown.explanations[shown.lineAt(at)], shown.lineAt(at)));
  }
  changed(at) {
    const { shown } = this, sides = shown.sides.filter((side) => side.drawn);
    const lists = sides.map((side) => {
      const blocks = side.changedAt(at);
      if (!blocks.length) return "";
      const items = blocks.slice(0, 12).map((block) => el("li", {}, this.blockLink(block), ": ", this.happened(side, block, side.place(block, at)).join("; ")));
      return el("div", {}, sides.length > 1 ? el("h4", {}, side.name) : "", el("ul", {}, items, blocks.length > 12 ? el("li", {}, `and ${blocks.length - 12} more`) : ""));
    }).filter(Boolean);
    return lists.length ? el("details", { open: true }, el("summary", {}, "Blocks that it changed"), lists) : "";
  }
  /** Sentences on a change of a block. */
  happened(side, block, place) {
    const now = side.change(place), first = place <= side.starts[block];
    const was = first ? side.change(-1) : side.change(place - 1);
    const text = ([id, group, column]) => `${id}, group ${group}, column ${column}`;
    const old = side.held(was.holders), held = side.held(now.holders), found = [];
    const known = (list, one) => list.some((each) => String(each) === String(one));
    const came = held.filter((each) => !known(old, each)), went = old.filter((each) => !known(held, each));
    for (const each of came) found.push(`${was.status & CACHED && was.key === now.key ? "adopted by" : "handed out to"} ${text(each)}`);
    if (was.key !== now.key && was.key >= 0) found.push(`its key ${side.keyOf(was)} went${was.tokens >= 0 ? ` (${was.tokens} tokens, group ${was.group})` : ""}`);
    if (was.key !== now.key && now.key >= 0) found.push(`cached${now.tokens >= 0 ? ` as the first ${now.tokens} tokens` : ""} under key ${side.keyOf(now)}, group ${now.group}`);
    for (const each of went) found.push(`given back by ${text(each)}`);
    if (was.references !== now.references) found.push(`${now.references} reference${now.references === 1 ? "" : "s"}`);
    const lost = !(now.status & (FREE | HELD | CACHED));
    if (lost) found.push("LOST: in no free list, nobody's");
    else if (now.status & FREE && now.status & HELD) found.push("IN THE FREE LIST while it is held");
    else if (now.status & FREE && !(was.status & FREE)) found.push(now.status & CACHED ? "free, still cached" : "free");
    return found;
  }
  ofBlock({ at, block, side: chosen }) {
    const { shown } = this, pool = shown.pools[shown.poolOf(block)];
    const parts = shown.sides.filter((side) => side.drawn).map((side) => this.blockOn(side, block, at));
    return el("section", {}, el("h2", {}, `Block ${shown.nameOf(block)} after line ${shown.lineAt(at)}`),
      shown.pools.length > 1 ? el("p", { class: "note" }, `pool ${pool.name}`) : "", parts);
  }
  blockOn(side, block, at) {
    const { shown } = this, cell = side.cell(block, at), held = side.held(cell.holders);
    const rows = held.map(([id, group, column]) => {
      const since = this.since(side, block, at, (each) => side.held(each.holders).some((one) => String(one) === String([id, group, column])));
      return el("li", {}, `${id}: ${shown.group(group)}, column ${column}, ${this.span(group, column)}, since `, this.line(since));
    });
    if (cell.status & CACHED) {
      const since = this.since(side, block, at, (each) => each.key === cell.key);
      rows.push(el("li", {}, `cached under key ${side.keyOf(cell)}${cell.tokens >= 0 ? `: the first ${cell.tokens} tokens of a prefix` : ""}, ${shown.group(cell.group)}, since `, this.line(since)));
    }
    const from = side.starts[block], count = side.starts[block + 1] - from, here = Math.max(0, side.place(block, at) - from);
    const first = Math.max(0, Math.min(here - NEAREST / 2, count - NEAREST)), items = [];
    for (let place = from + first; place < from + Math.min(count, first + NEAREST); place++) {
      const when = side.when[place];
      items.push(el("li", { class: when === at ? "now" : when > at ? "later" : "" }, this.line(when), ` ${when ? shown.words(when - 1) : "at first"}: `,
        this.happened(side, block, place).join("; ")));
    }
    const said = `Its life: ${count} change${count > 1 ? "s" : ""}${count > NEAREST ? `, the ${NEAREST} nearest` : ""}`;
    return el("div", { class: "side" }, el("h3", {}, `${side.name}: ${shown.status(side, cell)}`), rows.length ? el("ul", {}, rows) : "",
      items.length ? el("details", { open: true }, el("summary", {}, said), el("ol", { class: "life" }, items)) : el("p", { class: "note" }, "It was never used."));
  }
  /** Number of operations since which something holds of a block. */
  since(side, block, at, holds) {
    let place = side.place(block, at);
    while (place > side.starts[block] && holds(side.change(place - 1))) place--;
    return place < 0 ? 0 : side.when[place];
  }
  span(group, column) {
    const size = this.shown.groups[group] ? this.shown.groups[group].size : 0;
    return size ? `tokens ${column * size} to ${(column + 1) * size - 1}` : "";
  }
  ofMoment({ at }) {
    const { shown } = this;
    const rows = shown.sides.filter((side) => side.drawn && shown.blocks <= 20000).map((side) => {
      let free = 0, held = 0, cached = 0, lost = 0;
      for (let block = 0; block < shown.blocks; block++) {
        const place = side.place(block, at), status = place < 0 ? FREE : side.changes.status[side.order[place]];
        if (status & HELD) held++; else if (status & CACHED) cached++; else if (status & FREE) free++; else lost++;
      }
      const looked = side.looks[upper(side.looks, at) - 1] ?? 0;
      return el("tr", {}, el("th", {}, looked < at ? `${side.name}, line ${shown.lineAt(looked)}` : side.name), ...[held, cached, free, lost].map((count) => el("td", {}, String(count))));
    });
    return rows.length ? el("section", {}, el("h2", {}, `All blocks after line ${shown.lineAt(at)}`),
      el("table", { class: "counts" }, el("tr", {}, ...["", "held", "cached", "free", "lost"].map((name) => el("th", {}, name))), rows)) : "";
  }
  /** `hkv explain`'s account of a request. */
  account(told, line) {
    const { path } = this.shown;
    if (!told) return path && this.shown.subjects[this.shown.atLine(line) - 1] ? el("div", {}, el("p", { class: "note" }, "the reference's account of this line"), copied(`hkv explain ${path} --line ${line}`)) : "";
    if (told.refused) return el("p", { class: "note" }, `no account: ${told.refused}`);
    const rows = told.groups.map((group) => el("tr", {}, el("td", {}, `${group.group}`), el("td", {}, `${group.kind}:${group.block_size}`), el("td", {}, `${group.largest}`),
      el("td", {}, group.next === null ? "no longer hit is possible" : group.lacks.length ? group.lacks.map((lack) => el("p", {}, `tokens ${lack.first} to ${lack.last}: ${lack.why}`,
        lack.block === null ? "" : [" ", this.blockLink(this.shown.block(String(lack.block)))])) : "lacks nothing")));
    const next = (told.groups.find((group) => group.next !== null) || {}).next;
    return el("details", { open: true, class: "account" }, el("summary", {}, told.request ? `The reference on request ${told.request}` : "The reference"),
      told.answer && el("p", {}, `the reference${told.answer}`), told.differs && el("p", { class: "wrong" }, told.differs),
      told.departed !== null && told.departed < told.line ? el("p", { class: "note" }, `the answers are others from line ${told.departed} on; this is the reference's account`) : "",
      told.situation && el("p", {}, `before this line: ${told.situation}`),
      told.groups.length ? el("p", {}, `longest hit by definition: ${told.hit} tokens; every hit is a multiple of ${told.alignment}`) : "",
      told.found !== null && told.found !== told.hit ? el("p", { class: "wrong" }, `the lookup found ${told.found}: ${told.causes.join("; ")}`) : "",
      rows.length ? el("table", {}, el("tr", {}, ...["group", "kind", "alone", next ? `lacks for ${next} tokens` : "lacks"].map((name) => el("th", {}, name))), rows) : "",
      told.events.length ? el("details", {}, el("summary", {}, `what the request did, ${told.events.length} lines`), el("ol", { class: "life" },
        told.events.map(([line, text]) => el("li", {}, this.line(this.shown.atLine(line)), ` ${text}`)))) : "");
  }
  repeat() {
    const { shown } = this;
    const parts = shown.commands.map(({ what, command }) => el("div", { class: "copy" }, el("p", {}, what), copied(command)));
    if (shown.text) parts.push(el("div", { class: "copy" }, el("p", {}, "the case, as a log"), copied(shown.text)));
    return parts.length ? el("section", {}, el("h2", {}, "Again"), parts) : "";
  }
}

function copied(text) {
  const button = el("button", { class: "copier", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(code); button.textContent = "selected: Ctrl+C"; }
  } }, "copy");
  const code = el("pre", { tabindex: "0" }, text);
  return el("div", { class: "copied" }, code, button);
}

function fields(header) {
  const rows = Object.entries(header).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, el("code", {}, typeof value === "string" ? value : JSON.stringify(value)))));
  return el("table", { class: "fields" }, rows);
}

/** A text, with what it has not in common with the others' at both ends marked. */
function marked(text, answers) {
  const others = answers.map(([, other]) => other).filter((other) => other !== text);
  if (!others.length) return text;
  const [other] = others;
  let start = 0, end = 0;
  while (start < Math.min(text.length, other.length) && text[start] === other[start]) start++;
  while (end < Math.min(text.length, other.length) - start && text[text.length - 1 - end] === other[other.length - 1 - end]) end++;
  return [text.slice(0, start), el("mark", {}, text.slice(start, text.length - end) || "\u2205"), text.slice(text.length - end)];
}
