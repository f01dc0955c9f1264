// SPDX-License-Identifier: Apache-2.0
// Drawing: an image, cells over it in the colours of their scores, outlines and marks.

const LEAST_MARK = 7;
const DARK = 8; // of cells that were not compared

/** A canvas with an image on it, sharp on the screen it is shown on. */
export class Panel {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.cells = document.createElement("canvas");
    this.grey = document.createElement("canvas");
    this.image = null;
  }

  /** Take an image, and the size at which the canvas is shown. */
  fit(image) {
    const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
    const width = Math.max(1, Math.round((this.canvas.clientWidth || 300) * ratio));
    const height = Math.max(1, Math.round((width * image.naturalHeight) / image.naturalWidth));
    if (image === this.image && width === this.canvas.width) return;
    this.image = image;
    this.ratio = ratio;
    for (const canvas of [this.canvas, this.grey]) {
      canvas.width = width;
      canvas.height = height;
    }
    this.canvas.style.aspectRatio = `${image.naturalWidth} / ${image.naturalHeight}`;
    const pen = this.grey.getContext("2d");
    pen.filter = "grayscale(1)";
    pen.drawImage(image, 0, 0, width, height);
  }

  /** Draw the image in its colours. */
  photograph() {
    this.pen.drawImage(this.image, 0, 0, this.canvas.width, this.canvas.height);
  }

  /**
   * Draw the image in grey and the cells of a map over it.
   *
   * @param {object} map rows, columns, scores, and looked: the brightness of a cell; 0 is dark.
   * @param {number[]} full Rows and columns of the map if all its cells were whole.
   * @param {Uint8Array} colours 256 colours, RGB.
   * @param {number[]} band Top and bottom of the map, as shares of the image.
   */
  heat(map, full, colours, band) {
    const { width, height } = this.canvas;
    this.pen.drawImage(this.grey, 0, 0);
    const top = map.scores.reduce((a, b) => Math.max(a, b), 1e-12);
    this.cells.width = map.columns;
    this.cells.height = map.rows;
    const pen = this.cells.getContext("2d");
    const pixels = pen.createImageData(map.columns, map.rows);
    map.scores.forEach((score, i) => {
      const share = Math.sqrt(Math.max(0, score) / top); // small scores stay visible
      const bright = map.looked[i];
      const from = 3 * Math.min(255, Math.round(255 * share));
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = bright * colours[from + c] + (1 - bright) * DARK;
      pixels.data[4 * i + 3] = bright * (70 + 165 * share) + (1 - bright) * 190;
    });
    pen.putImageData(pixels, 0, 0);
    this.pen.imageSmoothingEnabled = false;
    const [first, last] = [band[0] * height, band[1] * height];
    const size = [(map.columns / full[1]) * width, (map.rows / full[0]) * (last - first)];
    this.pen.drawImage(this.cells, 0, first, ...size);
    this.pen.imageSmoothingEnabled = true;
    if (first > 0 || last < height) {
      this.pen.fillStyle = "rgb(8 8 8 / 0.75)";
      this.pen.fillRect(0, 0, width, first);
      this.pen.fillRect(0, last, width, height - last);
    }
  }

  /** Draw an outline around a cell: [y, x, height, width] as shares of the image. */
  outline([y, x, high, wide], { colour = "#fff", line = 1, opacity = 1 } = {}) {
    const { width, height } = this.canvas;
    const box = [x * width, y * height, wide * width, high * height];
    this.pen.globalAlpha = opacity;
    this.pen.lineWidth = (line + 2) * this.ratio;
    this.pen.strokeStyle = "rgb(0 0 0 / 0.55)";
    this.pen.strokeRect(...box);
    this.pen.lineWidth = line * this.ratio;
    this.pen.strokeStyle = colour;
    this.pen.strokeRect(...box);
    this.pen.globalAlpha = 1;
  }

  /** Draw a ring around a point, in pixels of the image. */
  ring([x, y], colour) {
    const scale = this.canvas.width / this.image.naturalWidth;
    const radius = Math.max(LEAST_MARK * this.ratio, this.canvas.width / 70);
    for (const [line, tone] of [[5, "rgb(0 0 0 / 0.7)"], [2.5, colour]]) {
      this.pen.beginPath();
      this.pen.arc((x + 0.5) * scale, (y + 0.5) * scale, radius, 0, 2 * Math.PI);
      this.pen.lineWidth = line * this.ratio;
      this.pen.strokeStyle = tone;
      this.pen.stroke();
    }
  }
}

/** Return 256 colours, RGB, between the given ones. */
export function ramp(stops) {
  const found = new Uint8Array(768);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c++) {
      found[3 * i + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
    }
  }
  return found;
}
