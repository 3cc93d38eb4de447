// The stage: one canvas a side, which pan and zoom together, and the choice of an operation and a block.
//
// `at` is a number of operations: after `at` of them a cell is what it is, and its line in the log is `lineAt(at)`. What is
// drawn is drawn anew only when the frame changes; the choice and the pointer are painted on a canvas of their own.

const MODES = [["blocks", BlockRows], ["requests", RequestRows], ["queue", QueueRows]];

class View {
  constructor(stage, tell) {
    this.stage = stage;
    this.tell = tell;
    this.choice = { at: 0, block: -1, side: 0 };
    this.found = null;
    this.mode = 0;
    new ResizeObserver(() => this.layout()).observe(stage);
  }
  /** Shows a case; with `stay`, newer data of the same one in the same frame, unless that showed everything. */
  show(shown, stay = false) {
    const all = !this.frame || !this.shown || this.frame.sx <= Math.min(46, (this.size.width - GUTTER) / (this.shown.count + 1)) + 1e-9;
    this.shown = shown;
    this.orders = MODES.map(() => null);
    this.choice = { at: Math.min(1, shown.count), block: -1, side: 0 };
    const figures = shown.sides.map((side, number) => this.figure(side, number));
    const drawn = figures.filter(({ side }) => side.drawn || !side.told); // a log without states has nothing to draw
    this.figures = drawn.length ? drawn : figures;
    this.stage.replaceChildren(...this.figures.map((figure) => figure.box));
    this.layout(!stay || all);
  }
  figure(side, number) {
    const base = el("canvas"), over = el("canvas", { tabindex: "0", role: "application" });
    const note = el("span"), caption = el("figcaption", {}, el("b", {}, side.name), " ", note);
    const box = el("figure", {}, caption, el("div", { class: "sheet" }, base, over));
    over.setAttribute("aria-label", `blocks of ${side.name} by operations; arrow keys choose, h for help`);
    const figure = { box, base, over, side, number, note };
    over.addEventListener("pointerdown", (event) => this.press(event, figure));
    over.addEventListener("pointermove", (event) => this.move(event, figure));
    over.addEventListener("pointerup", (event) => this.release(event, figure));
    over.addEventListener("pointerleave", () => { this.hover = null; this.paintOver(); this.tip(null); });
    over.addEventListener("wheel", (event) => this.wheel(event, figure), { passive: false });
    over.addEventListener("dblclick", (event) => this.zoom(event.shiftKey ? 0.5 : 2, event.offsetX, event.offsetY));
    return figure;
  }
  get rows() {
    this.orders[this.mode] ??= new MODES[this.mode][1](this.shown);
    return this.orders[this.mode];
  }
  setMode(mode) {
    if (mode === this.mode) return;
    this.mode = mode;
    this.fit();
  }
  /** Places the canvases; with `anew`, the frame shows everything. */
  layout(anew = false) {
    if (!this.figures) return;
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height) return;
    const two = this.figures.length > 1;
    this.beside = two && width > 700 && (this.shown.count + 1) * 13 < width / 2 - GUTTER;
    this.stage.classList.toggle("beside", this.beside);
    const wide = Math.floor(this.beside ? width / 2 - 4 : width);
    const high = Math.floor((this.beside ? height : height / this.figures.length) - 24);
    this.size = { width: wide, height: Math.max(90, high) };
    const ratio = window.devicePixelRatio || 1;
    for (const { base, over, box } of this.figures) {
      box.style.width = `${wide}px`;
      for (const canvas of [base, over]) {
        canvas.width = Math.round(wide * ratio);
        canvas.height = Math.round(this.size.height * ratio);
        canvas.style.width = `${wide}px`;
        canvas.style.height = `${this.size.height}px`;
        canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      }
    }
    if (anew || !this.frame) this.fit();
    else this.repaint();
  }
  get top() { return this.frame && this.frame.sx >= 13 ? Math.min(128, this.size.height * 0.42) : 22; }
  /** A frame that shows all operations and rows. */
  fit() {
    const columns = this.shown.count + 1, rows = Math.max(1, this.rows.count);
    const sx = Math.min(46, (this.size.width - GUTTER) / columns);
    this.frame = { x: 0, y: 0, sx, sy: 1 };
    this.frame.sy = Math.min(24, (this.size.height - this.top) / rows);
    if (this.choice.block >= 0) this.reveal();
    this.repaint();
  }
  /** Draws the choice large enough to read, if everything at once is not. */
  near() {
    if (this.frame.sy < NEAR.y + 4) this.frame.sy = 14;
    if (this.frame.sx < 13) this.frame.sx = 16;
    this.reveal();
    this.repaint();
  }
  zoom(factor, x = GUTTER, y = this.top, alone = "") {
    const { frame } = this, top = this.top;
    const column = frame.x + (x - GUTTER) / frame.sx, row = frame.y + (y - top) / frame.sy;
    const least = (this.size.width - GUTTER) / (this.shown.count + 1);
    if (alone !== "y") frame.sx = Math.max(Math.min(least, 46), Math.min(90, frame.sx * factor));
    const lowest = (this.size.height - this.top) / Math.max(1, this.rows.count);
    if (alone !== "x") frame.sy = Math.max(Math.min(lowest, 12), Math.min(30, frame.sy * factor));
    frame.x = column - (x - GUTTER) / frame.sx;
    frame.y = row - (y - this.top) / frame.sy;
    this.clamp();
    this.repaint();
  }
  clamp() {
    const { frame, size } = this;
    const across = (size.width - GUTTER) / frame.sx, down = (size.height - this.top) / frame.sy;
    frame.x = Math.max(0, Math.min(frame.x, this.shown.count + 1 - across));
    frame.y = Math.max(0, Math.min(frame.y, this.rows.count - down));
  }
  wheel(event) {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || event.altKey) {
      this.zoom(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY, event.altKey ? "y" : "");
    } else if (event.shiftKey) {
      this.pan(event.deltaY || event.deltaX, 0);
    } else {
      this.pan(event.deltaX, event.deltaY);
    }
  }
  pan(right, down) {
    this.frame.x += right / this.frame.sx;
    this.frame.y += down / this.frame.sy;
    this.clamp();
    this.repaint();
  }
  press(event, figure) {
    figure.over.setPointerCapture(event.pointerId);
    this.grip = { x: event.clientX, y: event.clientY, moved: false };
  }
  move(event, figure) {
    if (this.grip) {
      const right = this.grip.x - event.clientX, down = this.grip.y - event.clientY;
      if (!this.grip.moved && Math.hypot(right, down) < 4) return;
      this.grip = { x: event.clientX, y: event.clientY, moved: true };
      this.pan(right, down);
      return;
    }
    this.hover = this.under(event, figure);
    this.paintOver();
    this.tip(event, figure);
  }
  release(event, figure) {
    const grip = this.grip;
    this.grip = null;
    if (grip && !grip.moved) {
      const { at, block } = this.under(event, figure);
      this.choose({ at, block, side: figure.number });
      figure.over.focus({ preventScroll: true });
    }
  }
  /** What lies under the pointer. */
  under(event, figure) {
    const { frame } = this;
    const at = Math.max(0, Math.min(this.shown.count, Math.floor(frame.x + (event.offsetX - GUTTER) / frame.sx)));
    const row = Math.floor(frame.y + (event.offsetY - this.top) / frame.sy);
    const inside = event.offsetY >= this.top && row >= 0 && row < this.rows.count;
    return { at, row: inside ? row : -1, block: inside ? this.rows.block(figure.side, row, at) : -1 };
  }
  tip(event, figure) {
    this.bubble ??= this.stage.appendChild(el("div", { class: "tip", hidden: "" }));
    if (!this.bubble.isConnected) this.stage.appendChild(this.bubble);
    const there = event && this.hover;
    this.bubble.hidden = !there;
    if (!there) return;
    const { at, block } = this.hover, { side } = figure;
    const line = at ? `line ${this.shown.lineAt(at)}: ${this.shown.words(at - 1)}` : "before the first operation";
    const cell = block >= 0 && side.drawn ? `block ${this.shown.nameOf(block)}: ${this.shown.status(side, side.cell(block, at))}` : "";
    this.bubble.replaceChildren(el("b", {}, line), cell && el("br"), cell);
    const box = this.stage.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - this.bubble.offsetWidth - 6);
    const below = event.clientY - box.top + 18;
    this.bubble.style.left = `${Math.max(2, left)}px`;
    this.bubble.style.top = `${below + 50 > box.height ? below - 70 : below}px`;
  }
  /** Chooses an operation and a block; `reveal` moves the frame to it. */
  choose(choice, reveal = false) {
    Object.assign(this.choice, choice);
    this.choice.at = Math.max(0, Math.min(this.shown.count, this.choice.at));
    if (reveal && this.reveal()) this.repaint(); else this.paintOver();
    this.tell(this.choice);
  }
  /** Moves the frame to the choice; true if it had to move. */
  reveal() {
    const { frame, size } = this, before = `${frame.x} ${frame.y}`, { at, block, side } = this.choice;
    const across = (size.width - GUTTER) / frame.sx, down = (size.height - this.top) / frame.sy;
    if (at < frame.x || at + 1 > frame.x + across) frame.x = at - across / 2;
    const row = block < 0 ? -1 : this.rows.rowOf(this.shown.sides[side], block, at);
    if (row >= 0 && (row < frame.y || row + 1 > frame.y + down)) frame.y = row - down / 2;
    this.clamp();
    return before !== `${frame.x} ${frame.y}`;
  }
  /** Row of the choice, on one side. */
  chosenRow(side) {
    return this.choice.block < 0 ? -1 : this.rows.rowOf(side, this.choice.block, this.choice.at);
  }
  repaint() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.palette ??= new Palette(document.documentElement);
      for (const { base, side, note } of this.figures) {
        const frame = { ...this.frame, ...this.size, top: this.top };
        const kept = this.mode !== 2 || side.queue.whole || !side.drawn;
        note.textContent = kept ? side.problem : "the order of the free queue is kept of shorter cases only";
        paintSide(base.getContext("2d"), this.palette, this.shown, side, this.rows, frame);
      }
      this.paintOver();
    });
  }
  /** The choice, the pointer, and what was found. */
  paintOver() {
    if (!this.palette || !this.frame) return;
    const { frame, size, palette } = this, top = this.top;
    for (const { over, side } of this.figures) {
      const pen = over.getContext("2d");
      pen.clearRect(0, 0, size.width, size.height);
      const column = (at) => GUTTER + (at - frame.x) * frame.sx, line = (row) => top + (row - frame.y) * frame.sy;
      const band = (at, row, colour, alpha) => {
        pen.fillStyle = colour;
        pen.globalAlpha = alpha;
        if (at >= 0 && column(at + 1) > GUTTER) pen.fillRect(Math.max(GUTTER, column(at)), 0, Math.max(1.5, frame.sx), size.height);
        if (row >= 0 && line(row + 1) > top) pen.fillRect(0, Math.max(top, line(row)), size.width, Math.max(1.5, frame.sy));
        pen.globalAlpha = 1;
      };
      if (this.hover) band(this.hover.at, this.hover.row, palette.ink, 0.07);
      if (this.found) this.paintFound(pen, side, column, line, top);
      const row = this.chosenRow(side);
      band(this.choice.at, row, palette.choice, 0.16);
      if (row >= 0 && line(row) >= top - frame.sy) {
        pen.strokeStyle = palette.choice;
        pen.lineWidth = 2;
        pen.strokeRect(column(this.choice.at) - 1, line(row) - 1, Math.max(5, frame.sx) + 1, Math.max(5, frame.sy) + 1);
      }
    }
  }
  /** Spans of blocks that a request holds, or that are under a key. */
  paintFound(pen, side, column, line, top) {
    if (!this.rows.fixed) return;
    pen.strokeStyle = this.palette.choice;
    pen.lineWidth = 2;
    for (const [block, from, to] of this.found(side)) {
      const y = line(this.rows.rowOf(side, block));
      if (y < top - this.frame.sy || y > this.size.height) continue;
      const x = Math.max(GUTTER, column(from)), end = Math.min(this.size.width, column(to + 1));
      if (end > x) pen.strokeRect(x, y + 0.5, end - x - 1, Math.max(2, this.frame.sy - 1));
    }
  }
  /** Moves the choice by rows and operations. */
  step(right, down) {
    const side = this.shown.sides[this.choice.side], row = Math.max(0, this.chosenRow(side));
    const at = Math.max(0, Math.min(this.shown.count, this.choice.at + right));
    let block = this.choice.block;
    if (down) {
      const next = this.choice.block < 0 ? 0 : Math.max(0, Math.min(this.rows.count - 1, row + down));
      block = this.rows.block(side, next, at);
    }
    this.choose({ at, block }, true);
  }
  /** On to the next operation at which a reader may want to stop. */
  stop(direction) {
    this.stops ??= new Map();
    if (!this.stops.has(this.shown)) this.stops.set(this.shown, this.shown.stops());
    const stops = this.stops.get(this.shown);
    const place = direction > 0 ? stops.find((at) => at > this.choice.at) : stops.findLast((at) => at < this.choice.at);
    if (place !== undefined) this.choose({ at: place }, true);
    return place !== undefined;
  }
}
