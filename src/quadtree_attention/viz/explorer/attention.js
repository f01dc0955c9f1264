// SPDX-License-Identifier: Apache-2.0
// Attention of one sample from its queries and keys: candidates, scores and kept cells, at any K.

/** Return the means of a map over visible cells per level, coarse to fine. */
function pyramid(map, levels, width) {
  const found = [map];
  for (let i = 1; i < levels; i++) found.unshift(pooled(found[0], width));
  return found;
}

function pooled(below, width) {
  const stepY = below.rows === 1 && below.flat ? 1 : 2;
  const rows = Math.ceil(below.rows / stepY);
  const columns = Math.ceil(below.columns / 2);
  const values = new Float32Array(rows * columns * width);
  const visible = new Uint8Array(rows * columns);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      const to = y * columns + x;
      let count = 0;
      for (let v = y * stepY; v < Math.min(below.rows, (y + 1) * stepY); v++) {
        for (let u = x * 2; u < Math.min(below.columns, x * 2 + 2); u++) {
          const from = v * below.columns + u;
          if (!below.visible[from]) continue;
          count++;
          for (let i = 0; i < width; i++) values[to * width + i] += below.values[from * width + i];
        }
      }
      visible[to] = count > 0 ? 1 : 0;
      if (count > 1) for (let i = 0; i < width; i++) values[to * width + i] /= count;
    }
  }
  return { values, visible, rows, columns, flat: below.flat };
}

function softmax(logits) {
  const top = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const scores = logits.map((x) => Math.exp(x - top));
  const total = scores.reduce((a, b) => a + b, 0);
  return scores.map((x) => x / total);
}

export class Attention {
  /**
   * @param {object} layer kind, variant, levels, scale, weights, heads, channels.
   * @param {object} sample grid and keyGrid, [rows, columns]; flat: whether they are rows.
   * @param {Float32Array} q Queries (cells, heads, channels).
   * @param {Float32Array} k Keys.
   * @param {?Uint8Array} queryMask Visible cells.
   * @param {?Uint8Array} keyMask Visible keys.
   */
  constructor(layer, sample, q, k, queryMask, keyMask) {
    this.layer = layer;
    this.sample = sample;
    const width = layer.heads * layer.channels;
    const map = (values, grid, mask) => ({
      values,
      visible: mask ?? new Uint8Array(grid[0] * grid[1]).fill(1),
      rows: grid[0],
      columns: grid[1],
      flat: sample.flat,
    });
    this.queries = pyramid(map(q, sample.grid, queryMask), layer.levels, width);
    this.keys = pyramid(map(k, sample.keyGrid, keyMask), layer.levels, width);
  }

  /** Return how many finest cells a cell of a level has along y and x. */
  side(level) {
    const side = 2 ** (this.layer.levels - 1 - level);
    return [this.sample.flat ? 1 : side, side];
  }

  /** Return the cell of a level, as [y, x], that holds a cell of the finest map. */
  cellAt(level, y, x) {
    const [high, wide] = this.side(level);
    return [Math.floor(y / high), Math.floor(x / wide)];
  }

  logits(level, y, x, head, cells) {
    const { channels, heads, scale } = this.layer;
    const queries = this.queries[level];
    const keys = this.keys[level];
    const [row, column] = this.cellAt(level, y, x);
    const from = ((row * queries.columns + column) * heads + head) * channels;
    const query = queries.values.subarray(from, from + channels);
    return Float64Array.from(cells, (cell) => {
      let sum = 0;
      const at = (cell * heads + head) * channels;
      for (let i = 0; i < channels; i++) sum += query[i] * keys.values[at + i];
      return sum * scale;
    });
  }

  /**
   * Return the candidates of a query at every level, for one head.
   *
   * Each level has `cells`, `scores` and `kept`, of the same length; cells are numbers on the key
   * grid of the level, row by row.
   */
  look(y, x, head, topk) {
    const { levels, variant } = this.layer;
    const found = [];
    for (let level = 0; level < levels; level++) {
      const keys = this.keys[level];
      let cells = [];
      let handed = null;
      const parents = found[level - 1];
      if (!parents) {
        for (let cell = 0; cell < keys.visible.length; cell++) if (keys.visible[cell]) cells.push(cell);
      } else {
        ({ cells, handed } = this.children(level, parents));
      }
      const logits = this.logits(level, y, x, head, cells);
      let scores;
      if (variant === "A" && handed) scores = productScores(logits, handed);
      else scores = softmax(logits);
      const kept = new Uint8Array(cells.length);
      if (level < levels - 1) {
        const rank = variant === "A" ? scores : logits;
        const order = Array.from(cells.keys()).sort((a, b) => rank[b] - rank[a] || a - b);
        for (const i of order.slice(0, topk[level])) kept[i] = 1;
      }
      found.push({ cells, scores, kept });
    }
    return found;
  }

  /** Return the visible children of kept cells, and for each its parent's place and score. */
  children(level, parents) {
    const keys = this.keys[level];
    const above = this.keys[level - 1];
    const stepY = this.sample.flat ? 1 : 2;
    const cells = [];
    const handed = [];
    parents.cells.forEach((parent, place) => {
      if (!parents.kept[place]) return;
      const y = Math.floor(parent / above.columns) * stepY;
      const x = (parent % above.columns) * 2;
      for (let v = y; v < Math.min(keys.rows, y + stepY); v++) {
        for (let u = x; u < Math.min(keys.columns, x + 2); u++) {
          const cell = v * keys.columns + u;
          if (!keys.visible[cell]) continue;
          cells.push(cell);
          handed.push({ parent: place, score: parents.scores[place] });
        }
      }
    });
    return { cells, handed };
  }

  /** Return maps per level, means over heads: scores, and shares of heads that compared and kept. */
  maps(y, x, heads, topk) {
    const found = this.keys.map((keys) => ({
      rows: keys.rows,
      columns: keys.columns,
      scores: new Float32Array(keys.rows * keys.columns),
      looked: new Float32Array(keys.rows * keys.columns),
      kept: new Float32Array(keys.rows * keys.columns),
      message: new Float32Array(keys.rows * keys.columns),
    }));
    const { variant, weights, levels } = this.layer;
    if (this.layer.kind !== "quadtree") {
      found[0].scores = this.dense(y, x, heads);
      found[0].message = found[0].scores;
      found[0].looked.fill(1);
      return found;
    }
    for (const head of heads) {
      this.look(y, x, head, topk).forEach((look, level) => {
        const map = found[level];
        look.cells.forEach((cell, i) => {
          map.scores[cell] += look.scores[i] / heads.length;
          map.looked[cell] += 1 / heads.length;
          map.kept[cell] += look.kept[i] / heads.length;
          const refined = level < levels - 1 && look.kept[i];
          const part = variant === "A" ? 1 - refined : weights[level];
          map.message[cell] += (look.scores[i] * part) / heads.length;
        });
      });
    }
    return found;
  }

  /** Return the share of the message that comes from each cell of the finest map. */
  message(maps) {
    const finest = maps.at(-1);
    const total = new Float32Array(finest.scores.length);
    maps.forEach((map, level) => {
      const [high, wide] = this.side(level);
      for (let y = 0; y < finest.rows; y++) {
        for (let x = 0; x < finest.columns; x++) {
          const cell = Math.floor(y / high) * map.columns + Math.floor(x / wide);
          total[y * finest.columns + x] += map.message[cell] / (high * wide);
        }
      }
    });
    return total;
  }

  /** Return, for each finest cell, the share of levels down to the finest one that compared it. */
  depth(maps) {
    const finest = maps.at(-1);
    const found = new Float32Array(finest.scores.length);
    maps.forEach((map, level) => {
      const [high, wide] = this.side(level);
      for (let y = 0; y < finest.rows; y++) {
        for (let x = 0; x < finest.columns; x++) {
          const cell = Math.floor(y / high) * map.columns + Math.floor(x / wide);
          if (map.looked[cell] > 0) found[y * finest.columns + x] = (level + 1) / maps.length;
        }
      }
    });
    return found;
  }

  /** Return the scores of a query for all keys of the finest map: full attention. */
  dense(y, x, heads) {
    const last = this.layer.levels - 1;
    const keys = this.keys[last];
    const cells = Array.from(keys.visible.keys()).filter((cell) => keys.visible[cell]);
    const found = new Float32Array(keys.visible.length);
    for (const head of heads) {
      const linear = this.layer.kind === "linear";
      const scores = linear
        ? this.linearScores(y, x, head, cells)
        : softmax(this.logits(last, y, x, head, cells));
      cells.forEach((cell, i) => {
        found[cell] += scores[i] / heads.length;
      });
    }
    return found;
  }

  linearScores(y, x, head, cells) {
    const { channels, heads } = this.layer;
    const feature = (value) => (value > 0 ? value + 1 : Math.exp(value));
    const queries = this.queries[0];
    const from = ((y * queries.columns + x) * heads + head) * channels;
    const products = Float64Array.from(cells, (cell) => {
      let sum = 0;
      const at = (cell * heads + head) * channels;
      for (let i = 0; i < channels; i++) {
        sum += feature(queries.values[from + i]) * feature(this.keys[0].values[at + i]);
      }
      return sum;
    });
    const total = products.reduce((a, b) => a + b, 0) || 1;
    return products.map((product) => product / total);
  }

  /** Return the share of full attention inside of the cells that a level keeps. */
  mass(dense, maps, level) {
    const map = maps[level];
    const finest = this.keys.at(-1);
    const [high, wide] = this.side(level);
    let sum = 0;
    for (let y = 0; y < finest.rows; y++) {
      for (let x = 0; x < finest.columns; x++) {
        const cell = Math.floor(y / high) * map.columns + Math.floor(x / wide);
        sum += dense[y * finest.columns + x] * map.kept[cell];
      }
    }
    return sum;
  }
}

/** Return variant A's scores: a softmax over the children of a cell, times the cell's score. */
function productScores(logits, handed) {
  const scores = new Float64Array(logits.length);
  for (let start = 0; start < logits.length; ) {
    let end = start + 1;
    while (end < logits.length && handed[end].parent === handed[start].parent) end++;
    const shares = softmax(logits.subarray(start, end));
    shares.forEach((share, i) => {
      scores[start + i] = share * handed[start].score;
    });
    start = end;
  }
  return scores;
}
