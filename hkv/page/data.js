// Data of the page: unpacking, and the history of each block.
//
// A page holds cases, a case one side or more: an engine, or a log. A side is a list of changes, sorted by operation
// and block; `byBlock` sorts it by block, so that a cell (a block after an operation) is found by bisection.

const FREE = 1, HELD = 2, CACHED = 4;

/** Inflates the packed data of a page: JSON, whose "$" entries refer to columns and texts behind it. */
async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return resolve(head, buffer, 4 + length);
}

const KINDS = {
  uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, int32: Int32Array,
  float64: Float64Array,
};

const LINED = ["operations", "answers"]; // texts of which single lines are asked for

function resolve(value, buffer, base, field = "") {
  if (Array.isArray(value)) return value.map((each) => resolve(each, buffer, base));
  if (value === null || typeof value !== "object") return value;
  if (value.$) {
    const [kind, offset, count] = value.$;
    if (kind === "text") {
      const bytes = new Uint8Array(buffer, base + offset, count);
      return LINED.includes(field) ? new Lines(bytes) : new TextDecoder().decode(bytes);
    }
    const column = new KINDS[kind.replace("+", "")](buffer, base + offset, count);
    if (!kind.endsWith("+")) return column;
    const sums = new Int32Array(count);
    for (let at = 0, sum = 0; at < count; at++) sums[at] = sum += column[at];
    return sums;
  }
  const found = {};
  for (const name of Object.keys(value)) found[name] = resolve(value[name], buffer, base, name);
  return found;
}

/** Lines of a text, decoded when they are asked for. */
class Lines {
  constructor(bytes) {
    this.bytes = bytes;
    let count = 1;
    for (let at = 0; at < bytes.length; at++) count += bytes[at] === 10;
    this.starts = new Int32Array(count + 1);
    for (let at = 0, line = 1; at < bytes.length; at++) if (bytes[at] === 10) this.starts[line++] = at + 1;
    this.starts[count] = bytes.length + 1;
  }
  static of(value) {
    return value instanceof Lines ? value : new Lines(new TextEncoder().encode(value || ""));
  }
  get length() { return this.starts.length - 1; }
  line(at) {
    if (!(at >= 0 && at < this.length)) return "";
    return new TextDecoder().decode(this.bytes.subarray(this.starts[at], this.starts[at + 1] - 1));
  }
}

/** Number of entries of a sorted column, within [low, high), that are at most a value; plus low. */
function upper(column, value, low = 0, high = column.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

/** One engine, or a log's own states. */
class Side {
  constructor(given, blocks) {
    Object.assign(this, given);
    this.answers = Lines.of(given.answers);
    this.blocks = blocks;
    const { at, block } = this.changes, count = at.length;
    this.starts = new Int32Array(blocks + 1);
    for (let place = 0; place < count; place++) this.starts[block[place] + 1]++;
    for (let each = 0; each < blocks; each++) this.starts[each + 1] += this.starts[each];
    const next = this.starts.slice();
    this.order = new Int32Array(count);
    this.when = new Int32Array(count);
    for (let place = 0; place < count; place++) {
      const to = next[block[place]]++;
      this.order[to] = place;
      this.when[to] = at[place];
    }
    this.byAt = at;
    this.drawn = this.looks.length > 0;
    this.until = this.drawn ? this.looks[this.looks.length - 1] : -1;
  }
  /** Place in `order` of the change of a block that holds after `at` operations; -1 before any. */
  place(block, at) {
    const place = upper(this.when, at, this.starts[block], this.starts[block + 1]) - 1;
    return place < this.starts[block] ? -1 : place;
  }
  /** A cell: what a block is after `at` operations. */
  cell(block, at) { return this.change(this.place(block, at)); }
  /** The cell that a change makes. */
  change(place) {
    if (place < 0) return { at: 0, status: FREE, group: -1, tokens: -1, key: -1, references: 0, holders: 0 };
    const row = this.order[place], { changes } = this;
    return {
      at: this.when[place], status: changes.status[row], group: changes.group[row], tokens: changes.tokens[row],
      key: changes.key[row], references: changes.references[row], holders: changes.holders[row],
    };
  }
  /** Holders of a set: [request, group, column] each. */
  held(set) {
    const { start, request, group, column } = this.holders, found = [];
    for (let at = start[set]; at < start[set + 1]; at++) found.push([this.requests[request[at]], group[at], column[at]]);
    return found;
  }
  keyOf(cell) { return cell.key < 0 ? "" : this.keys[cell.key]; }
  /** True if the side was looked at after `at` operations. */
  looked(at) {
    const place = upper(this.looks, at) - 1;
    return place >= 0 && this.looks[place] === at;
  }
  /** Blocks that changed after exactly `at` operations. */
  changedAt(at) {
    const found = [];
    for (let place = upper(this.byAt, at - 1); place < this.byAt.length && this.byAt[place] === at; place++) {
      found.push(this.changes.block[place]);
    }
    return found;
  }
  /** The free queues, a list a pool, after `at` operations; null where they are not kept. */
  queueAt(at) {
    const { queue } = this, which = upper(queue.at, at) - 1;
    if (which < 0) return null;
    const pools = queue.lengths.length / queue.at.length;
    if (!this.queueStarts) {
      this.queueStarts = new Int32Array(queue.lengths.length + 1);
      queue.lengths.forEach((length, place) => { this.queueStarts[place + 1] = this.queueStarts[place] + length; });
    }
    const found = [];
    for (let pool = 0; pool < pools; pool++) {
      const place = which * pools + pool;
      found.push(queue.blocks.subarray(this.queueStarts[place], this.queueStarts[place + 1]));
    }
    return found;
  }
}

/** One case: operations, sides, marks. */
class Case {
  constructor(given) {
    Object.assign(this, given);
    this.lines = Lines.of(given.operations);
    this.count = given.operations ? this.lines.length : 0;
    this.starts = [0];
    for (const pool of this.pools) this.starts.push(this.starts[this.starts.length - 1] + pool.size);
    this.blocks = this.starts[this.starts.length - 1];
    this.sides = given.sides.map((side) => new Side(side, this.blocks));
    this.differs = new Uint8Array(this.count + 1);
    for (const index of this.differing) this.differs[index + 1] = 1;
  }
  /** Number of a request, by first appearance: the same on every side. */
  numberOf(id) {
    this.numbers ??= new Map([...new Set(this.subjects)].map((each, at) => [each, at]));
    return this.numbers.get(id) ?? 0;
  }
  /** Line of the log that stands for so many operations; the first ones of a live page are gone. */
  lineAt(at) { return this.first + at + 1; }
  /** Number of operations that a line stands for. */
  atLine(line) { return Math.max(0, line - 1 - this.first); }
  operation(index) { return JSON.parse(this.lines.line(index) || "{}"); }
  poolOf(block) { return upper(this.starts, block) - 1; }
  /** Name of a block: its id, behind its pool's number where there are several. */
  nameOf(block) {
    const pool = this.poolOf(block), id = this.pools[pool].first + block - this.starts[pool];
    return this.pools.length > 1 ? `${pool}.${id}` : `${id}`;
  }
  /** Number of the block of a name; -1 for none. */
  block(name) {
    const found = /^(?:(\d+)\.)?(\d+)$/.exec(name.trim());
    if (!found) return -1;
    const pool = Number(found[1] || 0), at = this.pools[pool];
    const place = at ? Number(found[2]) - at.first : -1;
    return place >= 0 && place < at.size ? this.starts[pool] + place : -1;
  }
  /** An operation in a few words. */
  words(index, long = false) {
    const { op, ...fields } = this.operation(index);
    if (!long) return `${op || ""} ${fields.id ?? fields.name ?? ""}`.trim();
    const quiet = ([, value]) => value !== false && value !== 0 && value !== null;
    return [op, ...Object.entries(fields).filter(quiet).map(([name, value]) => `${name}=${brief(value)}`)].join(" ");
  }
  group(number) {
    const group = this.groups[number];
    return group ? `group ${number} (${group.kind}:${group.size})` : "no group";
  }
  /** Sentence on a cell. */
  status(side, cell) {
    const held = side.held(cell.holders), others = cell.references - held.length;
    const by = held.map(([id]) => id).filter((id, at, all) => all.indexOf(id) === at);
    const cached = cell.status & CACHED ? "cached" : "";
    if (cell.status & HELD) {
      const who = by.length ? `held by ${by.join(", ")}` : "held, in no row";
      const more = by.length && others > 0 ? `and ${others} more reference${others > 1 ? "s" : ""}` : "";
      const wrong = cell.status & FREE ? "AND IN THE FREE LIST" : "";
      return [who, more, cached && "and cached", wrong].filter(Boolean).join(" ");
    }
    if (cached) return "cached, held by nobody: may be evicted";
    return cell.status & FREE ? "free" : "LOST: neither free, nor held, nor cached";
  }
  /** True if two sides' cells of a block differ after `at` operations. */
  unlike(block, at) {
    const drawn = this.sides.filter((side) => side.drawn);
    const told = drawn.some((side) => side.told); // what is told now and then is compared with a look at that moment
    if (drawn.length < 2 || !drawn.every((side) => at <= side.until && (!told || side.looked(at)))) return false;
    const [one, other] = drawn.slice(-2);
    const a = one.cell(block, at), b = other.cell(block, at);
    return a.status !== b.status || a.tokens !== b.tokens || one.keyOf(a) !== other.keyOf(b)
      || String(one.held(a.holders)) !== String(other.held(b.holders));
  }
  /** Block that an operation is most likely about: wrong in itself after it, named by a mark, or unlike on the sides. */
  culprit(at) {
    const sides = this.sides.filter((side) => side.drawn);
    const wrong = ({ status }) => !(status & (FREE | HELD | CACHED)) || ((status & FREE) && (status & HELD));
    const changed = sides.map((side) => side.changedAt(at));
    for (const [number, side] of sides.entries()) {
      const found = changed[number].find((block) => wrong(side.cell(block, at)));
      if (found !== undefined) return found;
    }
    for (const mark of this.pools.length < 2 ? this.marks : []) {
      const named = this.atLine(mark.line) === at && /\bblock ([\d.]+\d|\d+)/.exec(mark.text.join("\n"));
      if (named && this.block(named[1]) >= 0) return this.block(named[1]);
    }
    const apart = changed.flat().find((block) => this.unlike(block, at));
    if (apart !== undefined) return apart;
    if (this.blocks <= 20000 && sides.length > 1) {
      for (let block = 0; block < this.blocks; block++) if (this.unlike(block, at)) return block;
    }
    return changed.flat()[0] ?? -1;
  }
  /** Numbers of operations (from 1) after which a reader may want to stop: marks and differences. */
  stops() {
    const found = new Set(this.marks.map((mark) => this.atLine(mark.line)));
    for (let at = 1; at <= this.count; at++) if (this.differs[at]) found.add(at);
    return [...found].filter((at) => at >= 0).sort((a, b) => a - b);
  }
}

function brief(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
