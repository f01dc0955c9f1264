const about = JSON.parse(document.getElementById("about").textContent);
const canvas = document.getElementById("view"), context = canvas.getContext("2d");
const size = document.getElementById("size"), shown = document.getElementById("cameras");
const hover = document.getElementById("hover");

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const buffer = await unpacked(document.getElementById("data").textContent);
const count = about.count;
const places = new Float32Array(buffer, 0, 3 * count);
const colours = new Uint8Array(buffer, 12 * count, 3 * count);
if (count < 20000) size.value = count < 5000 ? 4 : 3; // few points have to be larger to be seen
let turn = about.turn, zoom = 1, shift = [0, 0], pending = false;

function times(a, b) {
  return [0, 1, 2].map((i) => [0, 1, 2].map((j) => a[i][0] * b[0][j] + a[i][1] * b[1][j] + a[i][2] * b[2][j]));
}

function rotate(dx, dy) {
  const [c, s, d, t] = [Math.cos(dx), Math.sin(dx), Math.cos(dy), Math.sin(dy)];
  turn = times([[1, 0, 0], [0, d, -t], [0, t, d]], times([[c, 0, s], [0, 1, 0], [-s, 0, c]], turn));
}

function projector(width, height) {
  const far = 3, scale = 1.2 * zoom * Math.min(width, height);
  return (x, y, z) => {
    const depth = turn[2][0] * x + turn[2][1] * y + turn[2][2] * z + far;
    if (depth < 0.05) return null;
    return [
      width / 2 + shift[0] * width + (scale * (turn[0][0] * x + turn[0][1] * y + turn[0][2] * z)) / depth,
      height / 2 + shift[1] * height + (scale * (turn[1][0] * x + turn[1][1] * y + turn[1][2] * z)) / depth,
      depth,
    ];
  };
}

let marks = [];
function draw() {
  pending = false;
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const project = projector(width, height), image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer).fill(0xff1a1614), depths = new Float32Array(width * height).fill(Infinity);
  const side = Math.max(1, Math.round((size.value * ratio) / 2));
  for (let i = 0; i < count; i++) {
    const at = project(places[3 * i], places[3 * i + 1], places[3 * i + 2]);
    if (!at) continue;
    const colour = 0xff000000 | (colours[3 * i + 2] << 16) | (colours[3 * i + 1] << 8) | colours[3 * i];
    const left = Math.round(at[0]), top = Math.round(at[1]);
    for (let y = top; y < top + side; y++) {
      if (y < 0 || y >= height) continue;
      for (let x = Math.max(0, left); x < Math.min(width, left + side); x++) {
        if (at[2] < depths[y * width + x]) { depths[y * width + x] = at[2]; pixels[y * width + x] = colour >>> 0; }
      }
    }
  }
  context.putImageData(image, 0, 0);
  marks = [];
  if (!shown.checked) return;
  context.strokeStyle = "#ff6a3d";
  context.lineWidth = ratio;
  for (const camera of about.cameras) {
    const [apex, ...corners] = camera.frustum.map((p) => project(...p));
    if (!apex || corners.some((c) => !c)) continue;
    context.beginPath();
    corners.forEach((corner, i) => {
      context.moveTo(apex[0], apex[1]);
      context.lineTo(corner[0], corner[1]);
      const next = corners[(i + 1) % 4];
      context.lineTo(next[0], next[1]);
    });
    context.stroke();
    marks.push([apex[0] / ratio, apex[1] / ratio, camera.name]);
  }
}
function redraw() { if (!pending) { pending = true; requestAnimationFrame(draw); } }

const fingers = new Map(); // of pointers that are down, where each is
function lifted(event) { fingers.delete(event.pointerId); }
canvas.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", lifted);
canvas.addEventListener("pointercancel", lifted);
canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect(), before = fingers.get(event.pointerId);
  if (!before) {
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const near = marks.find((mark) => Math.hypot(mark[0] - x, mark[1] - y) < 12);
    hover.textContent = near ? near[2] : "";
    return;
  }
  const after = [event.clientX, event.clientY], [dx, dy] = [after[0] - before[0], after[1] - before[1]];
  fingers.set(event.pointerId, after);
  const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
  if (other) {
    const apart = (point) => Math.max(1, Math.hypot(point[0] - other[0], point[1] - other[1]));
    zoom *= apart(after) / apart(before);
    shift = [shift[0] + dx / 2 / box.width, shift[1] + dy / 2 / box.height];
  } else if (event.shiftKey) shift = [shift[0] + dx / box.width, shift[1] + dy / box.height];
  else rotate(dx / 150, -dy / 150);
  redraw();
});
canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom *= Math.exp(-event.deltaY / 600); redraw(); }, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
  if (steps) rotate(...steps);
  else if (event.key === "+") zoom *= 1.1;
  else if (event.key === "-") zoom /= 1.1;
  else return;
  event.preventDefault();
  redraw();
});
size.addEventListener("input", redraw);
shown.addEventListener("input", redraw);
window.addEventListener("resize", redraw);

function showAllCameras() { // from further away, where some are outside of the view
  const [width, height] = [canvas.clientWidth, canvas.clientHeight], project = projector(width, height);
  for (const { frustum: [apex] } of about.cameras) {
    const at = project(...apex);
    if (at) zoom = Math.min(zoom, (0.46 * width) / Math.abs(at[0] - width / 2), (0.46 * height) / Math.abs(at[1] - height / 2));
  }
  zoom = Math.max(zoom, 0.3);
}
showAllCameras();
draw();
