// SPDX-License-Identifier: Apache-2.0
// The data of a page: JSON, and one block of bytes, gzip in base64.

/** Return the bytes of the page's data block. */
export async function readBytes(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return a map (cells, heads, channels), which is stored as int8 (heads, channels, cells). */
export function readMap(bytes, stored, cells, heads, channels) {
  const codes = new Int8Array(bytes.buffer, stored.at, cells * heads * channels);
  const values = new Float32Array(codes.length);
  let from = 0;
  for (let head = 0; head < heads; head++) {
    for (let channel = 0; channel < channels; channel++) {
      const step = stored.steps[head];
      let to = head * channels + channel;
      for (let cell = 0; cell < cells; cell++, from++, to += heads * channels) {
        values[to] = codes[from] * step;
      }
    }
  }
  return values;
}

/** Return float32 numbers, which need not be aligned in the block. */
export function readFloats(bytes, stored) {
  const part = bytes.slice(stored.at, stored.at + 4 * stored.count);
  return new Float32Array(part.buffer);
}

/** Return which cells of a map are visible, or null for all. */
export function readMask(bytes, stored, cells) {
  return stored ? bytes.subarray(stored.at, stored.at + cells) : null;
}
