// The last hour as curves, from the points that the server keeps.

import { call, poll } from "./api.js";
import { duration, h } from "./dom.js";

const POINTS_S = 10;
const KEPT_S = 3600;
const OVER = 6; // points over which a rate or a share is taken: a minute
const [WIDTH, HEIGHT] = [240, 56];
const CURVES = [
  ["Open sessions", (points, n) => points[n].open, (value) => value.toLocaleString("en")],
  ["Steps/s", (points, n) => grown(points, n, "steps", (steps, seconds) => steps / seconds), decimal],
  ["Success", (points, n) => share(points, n), (value) => `${(100 * value).toFixed(0)} %`],
  ["Broken/min", (points, n) => grown(points, n, "failed", (failed, seconds) => (60 * failed) / seconds), decimal],
];

/** Keep curves of the last hour up to date in an element. */
export function curves(signal) {
  const element = h("div", { class: "curves", role: "group", "aria-label": "The last hour" });
  let points = [];
  poll(async () => {
    const since = points.at(-1)?.time ?? 0;
    const { history } = await call(`v1/fleet?${new URLSearchParams({ since })}`, { signal });
    points = [...points, ...history];
    points = points.filter(({ time }) => time > points.at(-1).time - KEPT_S);
    if (points.length > 1) element.replaceChildren(...CURVES.map((curve) => figure(points, ...curve)));
  }, POINTS_S, signal);
  return element;
}

/** What a count has grown by over the last minute, as `per` of it; null after a restart, which counts from zero. */
function grown(points, n, name, per) {
  const first = points[Math.max(0, n - OVER)];
  const [more, seconds] = [points[n][name] - first[name], points[n].time - first.time];
  return seconds > 0 && more >= 0 ? per(more, seconds) : null;
}

function share(points, n) {
  const scored = grown(points, n, "scored", (more) => more);
  return scored ? grown(points, n, "succeeded", (more) => more / scored) : null;
}

function decimal(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function figure(points, name, valueAt, format) {
  const values = points.map((_, n) => valueAt(points, n));
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0);
  const text = (value) => (value === null ? "–" : format(value));
  const over = duration(points.at(-1).time - points[0].time);
  const label = known.length ? `${name} over ${over}, at most ${text(most)}` : `${name}: nothing over ${over}`;
  const now = h("dd", {}, text(values.at(-1)));
  const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
  const [begin, length] = [points[0].time, points.at(-1).time - points[0].time];
  const x = (n) => (WIDTH * (points[n].time - begin)) / length;
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 4) * value) / (most || 1);
  for (const line of unbroken(values)) {
    const places = line.map((n) => `${x(n).toFixed(1)},${y(values[n]).toFixed(1)}`);
    image.append(svg("polyline", { points: places.join(" ") }));
  }
  image.addEventListener("pointermove", ({ offsetX }) => {
    const time = begin + (length * offsetX) / image.clientWidth;
    const n = points.findIndex((point) => point.time >= time);
    now.textContent = `${text(values.at(n))}, ${duration(points.at(-1).time - points.at(n).time)} ago`;
  });
  image.addEventListener("pointerleave", () => { now.textContent = text(values.at(-1)); });
  return h("figure", {}, h("dl", { class: "figures" }, h("div", {}, h("dt", {}, name), now)), image,
    h("figcaption", { class: "faint" }, h("span", {}, `${over} ago`), h("span", {}, `at most ${text(most)}`), h("span", {}, "now")));
}

/** The runs of neighbouring known values, as places in the list. */
function unbroken(values) {
  const lines = [[]];
  values.forEach((value, n) => (value === null ? lines.push([]) : lines.at(-1).push(n)));
  return lines.filter((line) => line.length > 1);
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
