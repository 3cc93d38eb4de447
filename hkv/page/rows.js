// Orders of rows: blocks by their ids, requests' rows, the free queue.
//
// Every order answers the same questions: how many rows there are, what stands before each, and which block a row is
// after an operation (-1 for none). In the order of blocks the answer is the same for all operations; a request's row
// holds different blocks as it grows and is given back; a place in the queue another one almost every time.

class BlockRows {
  constructor(shown) { this.shown = shown; this.count = shown.blocks; this.fixed = true; }
  label(row) { return this.shown.nameOf(row); }
  block(side, row) { return row; }
  rowOf(side, block) { return block; }
  runs(side, row, from, to) { return blockRuns(side, row, from, to); }
  /** Rows at which a pool begins, with its name. */
  headings() {
    return this.shown.pools.map((pool, at) => [this.shown.starts[at], `${pool.name}, ${pool.size}`]);
  }
}

/** Runs of equal cells of a block within operations [from, to]: [first, last, cell]. */
function blockRuns(side, block, from, to) {
  const found = [], end = side.starts[block + 1];
  let place = side.place(block, from), start = from;
  for (;;) {
    const next = place < 0 ? side.starts[block] : place + 1;
    const until = next < end ? side.when[next] - 1 : Infinity;
    found.push([start, Math.min(until, to), block, side.change(place)]);
    if (until >= to) return found;
    place = next;
    start = until + 1;
  }
}

class RequestRows {
  constructor(shown) {
    this.shown = shown;
    const rows = new Map(), first = new Map();
    for (const side of shown.sides) {
      const { start, request, group, column } = side.holders;
      for (let at = 0; at < start[start.length - 1]; at++) {
        const id = side.requests[request[at]];
        rows.set(`${id}\n${group[at]}\n${column[at]}`, [id, group[at], column[at]]);
      }
    }
    shown.subjects.forEach((id, at) => { if (id && !first.has(id)) first.set(id, at); });
    this.list = [...rows.values()].sort(
      (a, b) => first.get(a[0]) - first.get(b[0]) || a[1] - b[1] || a[2] - b[2]);
    this.places = new Map(this.list.map((row, at) => [row.join("\n"), at]));
    this.count = this.list.length;
    this.spans = new Map();
  }
  label(row) {
    const [id, group, column] = this.list[row];
    return `${short(id, 6)} ${group}:${column}`;
  }
  headings() {
    const found = [];
    this.list.forEach(([id, group], at) => {
      const before = this.list[at - 1];
      if (!before || before[0] !== id || before[1] !== group) found.push([at, `${id}, ${this.shown.group(group)}`]);
    });
    return found;
  }
  /** When each row held which block: [first, last, block], by row, for one side. */
  held(side) {
    if (this.spans.has(side)) return this.spans.get(side);
    const found = this.list.map(() => []);
    for (let block = 0; block < side.blocks; block++) {
      let before = new Map();
      for (let place = side.starts[block]; place < side.starts[block + 1]; place++) {
        const set = side.changes.holders[side.order[place]], now = new Map();
        for (const held of side.held(set)) {
          const row = this.places.get(held.join("\n"));
          if (row !== undefined) now.set(row, before.get(row) ?? side.when[place]);
        }
        for (const [row, since] of before) if (!now.has(row)) found[row].push([since, side.when[place] - 1, block]);
        before = now;
      }
      for (const [row, since] of before) found[row].push([since, Infinity, block]);
    }
    found.forEach((spans) => spans.sort((a, b) => a[0] - b[0]));
    this.spans.set(side, found);
    return found;
  }
  block(side, row, at) {
    const span = (this.held(side)[row] || []).find(([first, last]) => first <= at && at <= last);
    return span ? span[2] : -1;
  }
  rowOf(side, block, at) {
    const [holder] = side.held(side.cell(block, at).holders);
    return holder ? this.places.get(holder.join("\n")) ?? -1 : -1;
  }
  runs(side, row, from, to) {
    const found = [];
    for (const [first, last, block] of this.held(side)[row] || []) {
      if (last >= from && first <= to) found.push(...blockRuns(side, block, Math.max(first, from), Math.min(last, to)));
    }
    return found;
  }
}

class QueueRows {
  constructor(shown) {
    this.shown = shown;
    const pools = shown.pools.length;
    this.longest = shown.pools.map(() => 0);
    for (const side of shown.sides) {
      side.queue.lengths.forEach((length, at) => {
        this.longest[at % pools] = Math.max(this.longest[at % pools], length);
      });
    }
    this.first = [0];
    this.longest.forEach((length, at) => this.first.push(this.first[at] + length));
    this.count = this.first[pools];
  }
  label(row) {
    const pool = upper(this.first, row) - 1;
    return `${row - this.first[pool] + 1}.`;
  }
  headings() { return this.shown.pools.map((pool, at) => [this.first[at], `next free: ${pool.name}`]); }
  block(side, row, at) {
    const queue = side.queueAt(at), pool = upper(this.first, row) - 1;
    const id = queue && queue[pool] ? queue[pool][row - this.first[pool]] : undefined;
    return id === undefined ? -1 : this.shown.starts[pool] + id - this.shown.pools[pool].first;
  }
  rowOf(side, block, at) {
    const queue = side.queueAt(at), pool = this.shown.poolOf(block);
    const place = queue ? queue[pool].indexOf(block - this.shown.starts[pool] + this.shown.pools[pool].first) : -1;
    return place < 0 ? -1 : this.first[pool] + place;
  }
  runs(side, row, from, to) {
    const found = [];
    for (let at = from; at <= to; at++) {
      const block = this.block(side, row, at);
      if (block < 0) continue;
      const last = found[found.length - 1];
      if (last && last[2] === block && last[1] === at - 1 && side.place(block, at) === last[4]) last[1] = at;
      else {
        const place = side.place(block, at);
        found.push([at, at, block, side.change(place), place]);
      }
    }
    return found;
  }
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
