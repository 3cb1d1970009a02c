// Latency of a model in the last minutes, from the histograms that the server counts for Prometheus.

const MINUTES = 5, LEFT = 60, TOP = 10, BOTTOM = 170, NARROW = 480;
const SVG = "http://www.w3.org/2000/svg";

/** What was seen of one model since it was chosen. */
export class Latency {
  #before = null;
  #points = [];

  constructor(model) {
    this.model = model;
  }

  /** Take in a text of metrics. */
  add(text, now) {
    const buckets = bucketsOf(text, this.model);
    if (this.#before && buckets.length) {
      const before = new Map(this.#before);
      const added = buckets.map(([limit, total]) => [limit, total - (before.get(limit) || 0)]);
      const last = added.at(-1)[1];
      // What workers counted that are gone may be gone as well.
      if (last > 0 && added.every(([, total]) => total >= 0)) {
        this.#points.push({ at: now, p50: quantile(added, 0.5), p99: quantile(added, 0.99), count: last });
      }
    }
    this.#before = buckets;
    this.#points = this.#points.filter((point) => now - point.at < MINUTES * 60e3);
  }

  /** Draw into an SVG, and say the same in words. */
  show(svg, words, now) {
    const width = svg.clientWidth || 640, right = width - 8;
    svg.setAttribute("viewBox", `0 0 ${width} 200`);
    const most = Math.max(1, ...this.#points.map((point) => point.p99)) * 1.15;
    const x = (at) => right - ((now - at) / (MINUTES * 60e3)) * (right - LEFT);
    const y = (value) => BOTTOM - (value / most) * (BOTTOM - TOP);
    svg.replaceChildren();
    for (const value of ticks(most)) {
      draw(svg, "line", { class: "grid", x1: LEFT, x2: right, y1: y(value), y2: y(value) });
      draw(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `${value} ms`);
    }
    for (let minute = 0; minute <= MINUTES; minute += width < NARROW ? MINUTES : 1) {
      const text = minute ? `${minute} min ago` : "now";
      const anchor = minute === 0 ? "end" : minute === MINUTES ? "start" : "middle";
      draw(svg, "text", { x: x(now - minute * 60e3), y: BOTTOM + 18, "text-anchor": anchor }, text);
    }
    for (const name of ["p99", "p50"]) {
      const points = this.#points.map((point) => `${x(point.at).toFixed(1)},${y(point[name]).toFixed(1)}`);
      draw(svg, "polyline", { class: name, points: points.join(" ") });
      this.#points.forEach((point) => draw(svg, "circle", { class: name, cx: x(point.at), cy: y(point[name]), r: 2.5 }));
    }
    const last = this.#points.at(-1);
    words.textContent = last
      ? `Requests lately: ${last.count}; half took at most ${last.p50.toFixed(1)} ms (solid line), 99 of 100 ` +
        `${last.p99.toFixed(1)} ms (dashed), estimated from histograms since the model was chosen.`
      : "No request since the model was chosen.";
  }
}

function ticks(most) {
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, index) => Number((index * step).toPrecision(6)));
}

/** Return pairs of upper limit in milliseconds and count up to it, in order. */
function bucketsOf(text, model) {
  const label = `model="${model.replace(/\\/g, "\\\\").replace(/"/g, '\\"')}"`, found = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith("aotexport_request_seconds_bucket{") || !line.includes(label)) continue;
    const limit = line.match(/le="([^"]+)"/)[1];
    const upper = limit === "+Inf" ? Infinity : Number(limit) * 1e3;
    found.set(upper, (found.get(upper) || 0) + Number(line.split("} ")[1])); // of all versions
  }
  return [...found].sort(([one], [other]) => one - other);
}

/** Return the value that a part of the requests does not exceed; straight lines between the limits. */
function quantile(buckets, part) {
  const wanted = part * buckets.at(-1)[1];
  let [lower, below] = [0, 0];
  for (const [upper, total] of buckets) {
    if (total >= wanted) {
      return upper === Infinity ? lower : lower + ((upper - lower) * (wanted - below)) / (total - below || 1);
    }
    [lower, below] = [upper, total];
  }
  return lower;
}

function draw(parent, tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  parent.append(made);
}
