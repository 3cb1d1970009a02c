// Tensors on the page: a form for inputs, a table or a picture for outputs.

import { count, element, fromNumber, isFloat, parsed, range, textOf, zeros } from "./tensors.js";

const MOST_EDITED = 4096, MOST_ROWS = 50, MOST_COLUMNS = 24, LEAST_SIDE = 8, MOST_BEST = 5;

/** Make an element with attributes, and children that are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const signature = (shape) => `[${shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;

/**
 * Return the fields of an input, a function that reads the tensor from them, and one that says beside them what is wrong.
 * `replace` takes the fields that stand in their place when a picture is chosen.
 */
export function field(spec, tensor, index, replace) {
  const seen = spec.range ? `, recorded from ${short(spec.range[0])} to ${short(spec.range[1])}` : "";
  const about = make("p", { class: "meta" }, `${spec.datatype}${signature(spec.shape)}${seen}`);
  const take = (made) => replace(field(spec, made, index, replace));
  const parts = [make("legend", {}, spec.name), about, ...upload(spec, tensor, index, take)];
  const drawn = picture(tensor);
  if (tensor.values.length > MOST_EDITED) {
    const text = `${tensor.values.length} values of shape ${signature(tensor.shape)}: too many to edit here, sent as they are.`;
    parts.push(make("p", { class: "note" }, text), ...(drawn ? [drawn] : []));
    return { element: make("fieldset", {}, ...parts), read: () => tensor, fail: null, name: spec.name };
  }
  const shape = make("input", { id: `shape-${index}`, value: tensor.shape.join(", "), autocomplete: "off" });
  const values = make("textarea", { id: `values-${index}`, spellcheck: "false" }, textOf(tensor));
  values.rows = Math.min(8, Math.max(2, values.value.split("\n").length));
  parts.push(make("label", { for: shape.id }, `Shape of ${spec.name}`), shape);
  const wrong = make("p", { id: `wrong-${index}`, role: "alert" });
  parts.push(make("label", { for: values.id }, `Values of ${spec.name}, row after row`), values, wrong, ...(drawn ? [drawn] : []));
  const fail = (text) => {
    wrong.textContent = text;
    for (const each of [shape, values]) {
      each.setAttribute("aria-invalid", String(Boolean(text)));
      each.setAttribute("aria-describedby", wrong.id);
    }
  };
  const read = () => parsed(spec, shape.value, values.value);
  return { element: make("fieldset", {}, ...parts), read, fail, name: spec.name };
}

/** Return fields that put a picture in the place of those of a tensor, if it has any: scaled to their size. */
function upload(spec, tensor, index, take) {
  const found = image(tensor);
  if (!found) return [];
  const ends = spec.ends ||= { black: 0, white: tensor.datatype === "UINT8" ? 255 : 1 };
  const numbers = Object.keys(ends).flatMap((name) => {
    const number = make("input", { id: `${name}-${index}`, type: "number", step: "any", value: ends[name] });
    number.addEventListener("input", () => { ends[name] = Number(number.value); });
    return [make("label", { for: number.id }, `Value of ${name} in ${spec.name}`), number];
  });
  const file = make("input", { id: `file-${index}`, type: "file", accept: "image/*" });
  const wrong = make("p", { role: "alert" });
  file.addEventListener("change", async () => {
    try {
      take(pixels(spec, tensor, found, await createImageBitmap(file.files[0])));
    } catch {
      wrong.textContent = `${file.files[0].name} is no picture that the browser reads.`;
    }
  });
  const label = make("label", { for: file.id }, `Picture for ${spec.name}`);
  return [make("details", {}, make("summary", {}, "Send a picture"), ...numbers, label, file, wrong)];
}

/** Return a tensor of one picture, in each place that its shape has at least. */
function pixels(spec, { datatype, shape }, { channels, height, width, step, plane }, bitmap) {
  const { black, white } = spec.ends, context = make("canvas", { width, height }).getContext("2d");
  context.drawImage(bitmap, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height), size = channels * height * width;
  const places = spec.shape.slice(0, -3).map((least) => Math.max(least, 1));
  const made = zeros({ name: spec.name, datatype, shape: [...places, ...shape.slice(-3)] }), values = new Float64Array(size);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const [red, green, blue] = data.subarray(4 * pixel, 4 * pixel + 3);
    const colours = channels === 3 ? [red, green, blue] : [0.299 * red + 0.587 * green + 0.114 * blue];
    colours.forEach((value, channel) => { values[pixel * step + channel * plane] = black + ((white - black) * value) / 255; });
  }
  const exact = made.values.constructor.from(values, (value) => fromNumber(datatype, value));
  for (let place = 0; place < count(places); place++) made.values.set(exact, place * size);
  return made;
}

/** Return an output as a table; before it a picture where it looks like one, the best classes where it scores them. */
export function output(tensor, classes) {
  const title = make("h4", {}, tensor.name), drawn = picture(tensor);
  const about = make("p", { class: "meta" }, `${tensor.datatype}${signature(tensor.shape)}`);
  return make("div", { class: "output" }, title, about, ...(drawn ? [drawn] : []), ...best(tensor, classes), table(tensor));
}

/** Return a line for each of the first rows of scores: the names of the classes that have the most. */
function best(tensor, classes) {
  const width = tensor.shape.at(-1);
  if (width !== classes.length || !isFloat(tensor.datatype)) return [];
  return Array.from({ length: Math.min(tensor.values.length / width, MOST_BEST) }, (_, row) => {
    const scores = classes.map((name, column) => ({ name, score: element(tensor, row * width + column) }));
    const found = scores.filter(({ score }) => !Number.isNaN(score)).sort((one, other) => other.score - one.score);
    const names = found.slice(0, MOST_BEST).map(({ name, score }) => `${name} ${short(score)}`).join(", ");
    return make("p", {}, `${place(row, tensor.shape.slice(0, -1))}: ${names}`);
  });
}

function table(tensor) {
  const width = tensor.shape.at(-1) ?? 1, rows = width ? tensor.values.length / width : 0;
  const columns = Math.min(width, MOST_COLUMNS);
  const head = make("tr", {}, make("td"));
  for (let column = 0; column < columns; column++) head.append(make("th", { scope: "col" }, String(column)));
  const body = make("tbody");
  for (let row = 0; row < Math.min(rows, MOST_ROWS); row++) {
    const cells = Array.from({ length: columns }, (_, column) => element(tensor, row * width + column));
    const greatest = width > 1 && width <= MOST_COLUMNS && isFloat(tensor.datatype)
      ? cells.reduce((best, value, column) => (value > (cells[best] ?? -Infinity) ? column : best), -1) : -1;
    const line = make("tr", {}, make("th", { scope: "row" }, place(row, tensor.shape.slice(0, -1))));
    cells.forEach((value, column) => line.append(
      column === greatest ? make("td", { class: "greatest" }, short(value)) : make("td", {}, short(value))));
    body.append(line);
  }
  const cut = rows > MOST_ROWS || width > MOST_COLUMNS;
  const caption = make("caption", { class: "meta" }, cut
    ? `The first ${Math.min(rows, MOST_ROWS)} of ${rows} rows, ${columns} of ${width} columns` : "");
  const whole = make("table", {}, ...(cut ? [caption] : []), make("thead", {}, head), body);
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${tensor.name}` }, whole);
}

const short = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(5) : String(value));

/** Return the indices of a row by the sizes of the axes before the last. */
function place(row, shape) {
  const indices = [];
  for (const size of [...shape].reverse()) {
    indices.unshift(row % size);
    row = Math.floor(row / size);
  }
  return indices.length ? `[${indices.join(", ")}]` : "values";
}

/** Return where the first image of a tensor lies in it, or null: channels first, then channels last. */
function image({ datatype, shape }) {
  const integers = datatype !== "UINT8" && (datatype.includes("INT") || datatype === "BOOL");
  if (shape.length < 3 || integers) return null;
  const [a, b, c] = shape.slice(-3), colours = (size) => size === 1 || size === 3;
  const large = (...sides) => sides.every((side) => side >= LEAST_SIDE && side <= 4096);
  if (colours(a) && large(b, c)) return { channels: a, height: b, width: c, step: 1, plane: b * c };
  if (colours(c) && large(a, b)) return { channels: c, height: a, width: b, step: c, plane: 1 };
  return null;
}

function picture(tensor) {
  const found = image(tensor);
  if (!found || count(tensor.shape) === 0) return null;
  const { channels, height, width, step, plane } = found, size = channels * height * width;
  const [least, most] = range(tensor, size);
  const label = `Picture of ${tensor.name}, from ${short(least)} (black) to ${short(most)} (white)`;
  const canvas = make("canvas", { width, height, role: "img", "aria-label": label, title: label });
  const pixels = new ImageData(width, height), scale = 255 / (most - least || 1);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let colour = 0; colour < 3; colour++) {
      const index = pixel * step + Math.min(colour, channels - 1) * plane;
      pixels.data[4 * pixel + colour] = (Number(element(tensor, index)) - least) * scale;
    }
    pixels.data[4 * pixel + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

