// Drawing of blocks by operations on a canvas.
//
// Near, each run of equal cells is a bar with the name of its holder, hatched by request, with edges where a key comes
// and goes. Far away, a pixel stands for many cells: their colours are added up by runs, never cell by cell, so that a
// log of 100,000 operations on 100,000 blocks is drawn in one pass over its changes.

const GUTTER = 58;
const NEAR = { x: 3, y: 6 };
const PATTERNS = 6;

/** Colours of the theme, read from the style sheet. */
class Palette {
  constructor(root) {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    for (const name of ["ground", "grid", "ink", "faint", "key", "gone", "wrong", "choice", "hatch", "lost"]) {
      this[name] = read(name);
    }
    this.groups = Array.from({ length: 8 }, (_, at) => rgb(read(`group${at}`)));
    this.back = rgb(this.ground);
    this.none = rgb(read("nogroup"));
    this.patterns = new Map();
  }
  /** Red, green and blue of a cell. */
  of(status, group) {
    if (!(status & (HELD | CACHED))) return status & FREE ? this.back : rgb(this.lost);
    const full = group < 0 ? this.none : this.groups[group % this.groups.length];
    if (status & HELD) return full;
    return full.map((value, at) => Math.round(value * 0.38 + this.back[at] * 0.62));
  }
  /** Hatching of a request. */
  pattern(context, number) {
    const kind = number % PATTERNS;
    if (this.patterns.has(kind)) return this.patterns.get(kind);
    const tile = new OffscreenCanvas(8, 8), pen = tile.getContext("2d");
    pen.strokeStyle = pen.fillStyle = this.hatch;
    pen.lineWidth = 1.2;
    const line = (...ends) => { pen.beginPath(); pen.moveTo(ends[0], ends[1]); pen.lineTo(ends[2], ends[3]); pen.stroke(); };
    if (kind === 0) { line(-1, 9, 9, -1); line(-1, 1, 1, -1); line(7, 9, 9, 7); }
    if (kind === 1) { line(-1, -1, 9, 9); line(-1, 7, 1, 9); line(7, -1, 9, 1); }
    if (kind === 2) line(0, 4, 8, 4);
    if (kind === 3) { line(-1, 9, 9, -1); line(-1, -1, 9, 9); }
    if (kind === 4) for (const [x, y] of [[1, 1], [5, 5]]) pen.fillRect(x, y, 2, 2);
    if (kind === 5) { line(0, 4, 8, 4); line(4, 0, 4, 8); }
    const made = context.createPattern(tile, "repeat");
    this.patterns.set(kind, made);
    return made;
  }
}

function rgb(text) {
  const digits = text.replace("#", "");
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16) || 0);
}

function css([red, green, blue]) { return `rgb(${red},${green},${blue})`; }

/** Draws one side. `frame` has width, height, top (of the rows), x and y (first column and row, may be broken), sx, sy. */
function paintSide(context, palette, shown, side, rows, frame) {
  const { width, height, top } = frame;
  context.fillStyle = palette.ground;
  context.fillRect(0, 0, width, height);
  const near = frame.sx >= NEAR.x && frame.sy >= NEAR.y;
  context.save();
  context.beginPath();
  context.rect(GUTTER, top, width - GUTTER, height - top);
  context.clip();
  if (side.drawn && rows.count) (near ? paintNear : paintFar)(context, palette, shown, side, rows, frame);
  if (side.until < shown.count) {
    // Behind the last look nothing is known: the engine failed, or the log ends without a state.
    context.fillStyle = palette.ground;
    context.fillRect(GUTTER + (side.until + 1 - frame.x) * frame.sx, top, width, height);
  }
  context.restore();
  paintLabels(context, palette, shown, side, rows, frame, near);
}

function paintNear(context, palette, shown, side, rows, frame) {
  const { width, height, top, sx, sy } = frame;
  const last = Math.min(shown.count, Math.ceil(frame.x + (width - GUTTER) / sx));
  const first = Math.max(0, Math.floor(frame.x));
  const lastRow = Math.min(rows.count - 1, Math.ceil(frame.y + (height - top) / sy));
  const gap = sy >= 9 ? 1 : 0;
  context.fillStyle = palette.grid;
  if (sx >= 7) for (let at = first; at <= last + 1; at++) context.fillRect(GUTTER + (at - frame.x) * sx, top, 0.6, height);
  context.font = `${Math.min(11, sy - 3)}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  for (let row = Math.max(0, Math.floor(frame.y)); row <= lastRow; row++) {
    const y = top + (row - frame.y) * sy;
    for (const [from, to, block, cell] of rows.runs(side, row, first, last)) {
      const x = GUTTER + (from - frame.x) * sx, wide = (to - from + 1) * sx;
      bar(context, palette, shown, side, cell, x, y + gap / 2, wide - (sx >= 7 ? 1 : 0), sy - gap, rows.fixed ? "" : shown.nameOf(block));
      if (cell.at === from && rows.fixed) keyEdge(context, palette, side, block, cell, x, y, sy);
      if (sx >= 5 && shown.sides.length > 1) paintUnlike(context, palette, shown, block, from, to, frame, y);
    }
  }
}

function bar(context, palette, shown, side, cell, x, y, wide, high, name) {
  const { status } = cell, lost = !(status & (FREE | HELD | CACHED));
  if (status === FREE && !name) return;
  context.fillStyle = css(palette.of(status, cell.group));
  context.fillRect(x, y, wide, high);
  const held = status & HELD ? side.held(cell.holders) : [];
  if (status & HELD && high >= 8) {
    context.fillStyle = palette.pattern(context, held.length ? shown.numberOf(held[0][0]) : 0);
    context.fillRect(x, y, wide, high);
  }
  if (status & CACHED) {
    context.fillStyle = palette.key;
    context.fillRect(x, y + high - 2, wide, 2);
  }
  if (lost || ((status & FREE) && (status & HELD))) {
    framed(context, palette, x + 1, y + 1, wide - 2, high - 2);
  }
  if (wide < 16 || high < 10) return;
  const ids = [...new Set(held.map(([id]) => id))];
  let text = lost ? "lost" : status & HELD ? ids[0] ?? `${cell.references} ref` : status & CACHED ? `${cell.tokens >= 0 ? `≤${cell.tokens}` : "cached"}` : "";
  if (ids.length > 1) text += ` +${ids.length - 1}`;
  if (name) text = text ? `${name} ${text}` : name;
  label(context, palette, text, Math.max(x, GUTTER), y, x + wide - Math.max(x, GUTTER), high, Boolean(status & HELD));
}

function label(context, palette, text, x, y, wide, high, strong) {
  const room = Math.floor((wide - 5) / 6.2);
  if (!text || room < 2) return;
  const shown = short(text, room);
  if (strong) return haloed(context, palette, shown, x + 3, y + high / 2, palette.ink);
  context.fillStyle = palette.ink;
  context.fillText(shown, x + 3, y + high / 2);
}

/** A text that can be read over bars and lines. */
function haloed(context, palette, text, x, y, colour) {
  context.lineWidth = 2.5;
  context.lineJoin = "round";
  context.strokeStyle = palette.ground;
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/** An edge where a key comes (a flag) or goes (a cross). */
function keyEdge(context, palette, side, block, cell, x, y, sy) {
  const before = cell.at > 0 ? side.cell(block, cell.at - 1) : null;
  const had = before && before.key >= 0, has = cell.key >= 0;
  if (before === null || before.key === cell.key) return;
  const size = Math.min(4, sy / 3);
  if (had) {
    context.strokeStyle = palette.gone;
    context.lineWidth = 1.6;
    context.beginPath();
    context.moveTo(x - size, y + 1); context.lineTo(x + size, y + 1 + 2 * size);
    context.moveTo(x + size, y + 1); context.lineTo(x - size, y + 1 + 2 * size);
    context.stroke();
  }
  if (has) {
    context.fillStyle = palette.key;
    context.beginPath();
    context.moveTo(x, y + sy); context.lineTo(x, y + sy - 3 * size); context.lineTo(x + 2 * size, y + sy);
    context.fill();
  }
}

/** An outline of the cells of a run in which the sides differ. */
function paintUnlike(context, palette, shown, block, from, to, frame, y) {
  let start = -1;
  for (let at = from; at <= to + 1; at++) {
    const unlike = at <= to && shown.unlike(block, at);
    if (unlike && start < 0) start = at;
    if (!unlike && start >= 0) {
      framed(context, palette, GUTTER + (start - frame.x) * frame.sx + 1.5, y + 1.5, (at - start) * frame.sx - 4, frame.sy - 4, [3, 2]);
      start = -1;
    }
  }
}

/** A frame in the colour of what is wrong, upon a wider one in the ground's, so that it can be told from any cell. */
function framed(context, palette, x, y, wide, high, dashes = []) {
  for (const [colour, width, dash] of [[palette.ground, 4.4, []], [palette.wrong, 2, dashes]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.strokeRect(x, y, wide, high);
  }
  context.setLineDash([]);
}

/** Far away: every pixel is the mean of the cells under it. */
function paintFar(context, palette, shown, side, rows, frame) {
  const { width, height, top, sx, sy } = frame;
  const first = Math.max(0, frame.x), last = Math.min(shown.count + 1, frame.x + (width - GUTTER) / sx);
  const rowFrom = Math.max(0, frame.y), rowTo = Math.min(rows.count, frame.y + (height - top) / sy);
  if (last <= first || rowTo <= rowFrom) return;
  const wide = Math.max(1, Math.round((last - first) * sx)), across = wide / (last - first);
  const coarse = sy < 1;
  const rowFirst = coarse ? rowFrom : Math.floor(rowFrom), rowLast = coarse ? rowTo : Math.ceil(rowTo);
  const high = coarse ? Math.max(1, Math.round((rowTo - rowFrom) * sy)) : rowLast - rowFirst;
  const image = new ImageData(wide, high), sums = new Mixer(wide);
  const colours = new Map();
  const colour = (status, group) => {
    const name = status * 64 + group;
    if (!colours.has(name)) colours.set(name, palette.of(status, group));
    return colours.get(name);
  };
  for (let line = 0; line < high; line++) {
    const from = Math.floor(rowFirst + (line * (rowLast - rowFirst)) / high);
    const to = Math.max(from + 1, Math.floor(rowFirst + ((line + 1) * (rowLast - rowFirst)) / high));
    if (rows.fixed) {
      for (let row = from; row < to; row++) mixBlock(sums, side, row, first, last, across, colour);
    } else if (rows.held) {
      for (let row = from; row < to; row++) {
        for (const [begin, end, block, cell] of rows.runs(side, row, Math.floor(first), Math.ceil(last) - 1)) {
          sums.add((begin - first) * across, (end + 1 - first) * across, colour(cell.status, cell.group));
        }
      }
    } else {
      for (let x = 0; x < wide; x++) {
        const block = rows.block(side, from, Math.floor(first + (x + 0.5) / across));
        if (block < 0) continue;
        const cell = side.cell(block, Math.floor(first + (x + 0.5) / across));
        sums.add(x, x + 1, colour(cell.status, cell.group));
      }
    }
    sums.take(image.data, line * wide * 4, to - from, palette.back, !rows.fixed);
  }
  const tile = new OffscreenCanvas(wide, high);
  tile.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(tile, GUTTER + (first - frame.x) * sx, top + (rowFirst - frame.y) * sy, wide, (rowLast - rowFirst) * sy);
}

function mixBlock(sums, side, block, first, last, across, colour) {
  const end = side.starts[block + 1], { order, when } = side, { status, group } = side.changes;
  let place = upper(when, Math.floor(first), side.starts[block], end) - 1;
  for (let start = first; start < last; ) {
    const next = Math.max(place + 1, side.starts[block]);
    const until = next < end ? Math.min(when[next], last) : last;
    const row = place < side.starts[block] ? -1 : order[place];
    if (until > start) {
      const value = row < 0 ? colour(FREE, -1) : colour(status[row], group[row]);
      sums.add((start - first) * across, (until - first) * across, value);
    }
    start = Math.max(until, start);
    if (next >= end) break;
    place = next;
  }
}

/** Sums of colours along a line of pixels, of which spans are added at their ends only. */
class Mixer {
  constructor(wide) {
    this.wide = wide;
    this.here = [0, 1, 2, 3].map(() => new Float32Array(wide + 2));
    this.step = [0, 1, 2, 3].map(() => new Float32Array(wide + 2));
  }
  add(from, to, colour) {
    from = Math.max(0, from);
    to = Math.min(this.wide, to);
    const a = Math.floor(from), b = Math.floor(to);
    for (let channel = 0; channel < 4; channel++) {
      const value = channel < 3 ? colour[channel] : 1, here = this.here[channel];
      if (a === b) here[a] += value * (to - from);
      else {
        here[a] += value * (a + 1 - from);
        here[b] += value * (to - b);
        this.step[channel][a + 1] += value;
        this.step[channel][b] -= value;
      }
    }
  }
  /** Writes the means of `count` rows, what none covers in the colour of the ground, and begins anew. */
  take(pixels, at, count, ground) {
    const sum = [0, 0, 0, 0];
    for (let x = 0; x < this.wide; x++) {
      for (let channel = 0; channel < 4; channel++) sum[channel] += this.step[channel][x];
      const covered = sum[3] + this.here[3][x], rest = Math.max(0, count - covered);
      for (let channel = 0; channel < 3; channel++) {
        const value = sum[channel] + this.here[channel][x] + rest * ground[channel];
        pixels[at + x * 4 + channel] = value / Math.max(count, covered);
      }
      pixels[at + x * 4 + 3] = 255;
    }
    for (const part of [...this.here, ...this.step]) part.fill(0);
  }
}

/** Names of rows and operations, and marks. */
function paintLabels(context, palette, shown, side, rows, frame, near) {
  const { width, height, top, sx, sy } = frame;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = palette.faint;
  const each = Math.max(1, Math.ceil(13 / sy));
  const unit = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000].find((step) => step >= each) ?? each;
  const from = Math.ceil(Math.max(0, frame.y) / unit) * unit;
  const headings = (rows.heads ??= rows.headings());
  let free = top;
  for (const [row, text] of near || headings.length < 40 ? headings : []) {
    const y = top + (row - frame.y) * sy;
    if (y < top - 1 || y > height) continue;
    context.fillStyle = palette.grid;
    context.fillRect(0, y, width, 1.2);
    if (y < free - 1 || (rows.fixed && shown.pools.length < 2)) continue;
    free = y + 13;
    context.textAlign = "right";
    haloed(context, palette, text, width - 6, y + 7, palette.faint);
    context.textAlign = "left";
  }
  for (let row = from; row < rows.count; row += unit) {
    const y = top + (row - frame.y + 0.5) * sy;
    if (y > height) break;
    if (y >= top) haloed(context, palette, rows.label(row), 4, Math.max(y, top + 7), palette.faint);
  }
  paintTops(context, palette, shown, side, frame);
}

function paintTops(context, palette, shown, side, frame) {
  const { width, top, sx } = frame;
  context.fillStyle = palette.ground;
  context.fillRect(0, 0, width, top);
  const last = Math.min(shown.count, Math.ceil(frame.x + (width - GUTTER) / sx));
  const words = sx >= 13, each = words ? 1 : Math.ceil(46 / sx);
  const unit = words ? 1 : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4].find((step) => step >= each) ?? each;
  for (let at = Math.max(0, Math.ceil((frame.x + 1) / unit) * unit - 1); at <= last; at += unit) {
    const x = GUTTER + (at - frame.x + 0.5) * sx;
    if (x < GUTTER) continue;
    context.fillStyle = palette.faint;
    if (!words) {
      const text = String(shown.lineAt(at)), wide = context.measureText(text).width;
      context.fillText(text, Math.min(x - wide / 2, width - wide - 2), top - 8);
      continue;
    }
    context.save();
    context.translate(x, top - 4);
    context.rotate(-Math.PI / 2);
    context.fillStyle = shown.differs[at] ? palette.wrong : palette.ink;
    context.fillText(short(at ? `${shown.lineAt(at)} ${shown.words(at - 1)}` : `${shown.lineAt(0)} start`, Math.floor((top - 6) / 5.8)), 0, 0);
    context.restore();
  }
  for (const mark of shown.marks) {
    const x = GUTTER + (shown.atLine(mark.line) - frame.x + 0.5) * sx;
    if (x < GUTTER || x > width) continue;
    context.strokeStyle = mark.kind === "line" ? palette.choice : palette.wrong;
    context.lineWidth = 2;
    context.setLineDash(mark.kind === "difference" ? [] : [4, 3]);
    context.strokeRect(x - Math.max(3, sx / 2), 1, Math.max(6, sx), frame.height - 2);
    context.setLineDash([]);
  }
}
