// Tensors of the protocol as typed arrays; requests and answers from and to bytes.

const ARRAYS = {
  BOOL: Uint8Array, INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array,
  UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array,
  FP16: Float16Array, BF16: Uint16Array, FP32: Float32Array, FP64: Float64Array,
};

export const withoutJson = (tensor) => tensor.datatype === "FP16" || tensor.datatype === "BF16";
export const isFloat = (datatype) => datatype.startsWith("FP") || datatype === "BF16";

export const count = (shape) => shape.reduce((product, size) => product * size, 1);

/** Return a tensor of zeros; sizes that are -1 become 1. */
export function zeros({ name, datatype, shape }) {
  const sizes = shape.map((size) => (size < 0 ? 1 : size));
  const values = datatype === "BYTES" ? Array(count(sizes)).fill("") : new ARRAYS[datatype](count(sizes));
  return { name, datatype, shape: sizes, values };
}

/** Return an element as a number, a big integer or a boolean. */
export function element({ datatype, values }, index) {
  const value = values[index];
  return datatype === "BOOL" ? value !== 0
    : datatype === "BF16" ? fromBrain(value)
    : value;
}

/** Return the least and the greatest of the first elements. */
export function range(tensor, end = tensor.values.length) {
  let least = Infinity, most = -Infinity;
  for (let index = 0; index < end; index++) {
    const value = Number(element(tensor, index));
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}

/** Return the tensor that a text and a shape say; throw an error that says what is wrong. */
export function parsed({ name, datatype }, shapeText, text) {
  const sizes = shapeText.split(/[\s,[\]]+/).filter(Boolean);
  if (!sizes.every((size) => /^\d+$/.test(size))) throw new Error(`${name}: the shape is a list of sizes, such as 1, 8`);
  const shape = sizes.map(Number);
  if (datatype === "BYTES") return { name, datatype, shape, values: [text.trim()] };
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  if (words.length !== count(shape)) {
    throw new Error(`${name}: the shape [${shape}] takes ${count(shape)} values, and there are ${words.length}`);
  }
  return { name, datatype, shape, values: ARRAYS[datatype].from(words, (word) => toValue(name, datatype, word)) };
}

function toValue(name, datatype, word) {
  if (datatype === "BOOL") {
    if (/^(true|1)$/i.test(word)) return 1;
    if (/^(false|0)$/i.test(word)) return 0;
  } else if (isFloat(datatype)) {
    const number = /^nan$/i.test(word) ? NaN : Number(word.replace(/inf(inity)?$/i, "Infinity"));
    if (!Number.isNaN(number) || /^nan$/i.test(word)) {
      return fromNumber(datatype, number);
    }
  } else if (/^[+-]?\d+$/.test(word)) {
    const whole = BigInt(word), bits = Number(datatype.match(/\d+$/)[0]);
    const fits = datatype[0] === "U" ? BigInt.asUintN(bits, whole) : BigInt.asIntN(bits, whole);
    if (fits === whole) return bits === 64 ? whole : Number(whole);
  }
  throw new Error(`${name}: ${word} is no value of ${datatype}`);
}

/** Return a number as its array holds it. */
export const fromNumber = (datatype, number) => (
  datatype === "BF16" ? toBrain(number) : datatype === "UINT8" ? Math.round(number) : number);

/** Return the elements as text, a line for each row of the last axis. */
export function textOf(tensor) {
  const width = tensor.shape.at(-1) || 1, lines = [];
  for (let row = 0; row < tensor.values.length; row += width) {
    lines.push(Array.from({ length: width }, (_, column) => shown(tensor, row + column)).join(", "));
  }
  return lines.join("\n");
}

/** Return an element as text that reads back as the same element. */
export function shown(tensor, index) {
  const value = element(tensor, index);
  if (tensor.datatype === "FP64" || typeof value !== "number" || Number.isInteger(value)) return String(value);
  const texts = [6, 7, 8, 9].map((digits) => String(Number(value.toPrecision(digits))));
  return texts.find((text) => Math.fround(Number(text)) === value) || String(value);
}

/** Return headers and body of a request for `tensors`, with every output as bytes. */
export function request(tensors) {
  const parts = tensors.map(({ datatype, values }) => (datatype === "BYTES" ? bytesOf(values[0]) : values));
  const inputs = tensors.map(({ name, datatype, shape }, index) => (
    { name, datatype, shape, parameters: { binary_data_size: parts[index].byteLength } }));
  const head = new TextEncoder().encode(JSON.stringify({ inputs, parameters: { binary_data_output: true } }));
  const headers = { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) };
  return { method: "POST", headers, body: new Blob([head, ...parts]) };
}

/** Return a string as raw bytes of the protocol: its length, four bytes, and UTF-8. */
function bytesOf(text) {
  const encoded = new TextEncoder().encode(text), bytes = new Uint8Array(4 + encoded.length);
  new DataView(bytes.buffer).setUint32(0, encoded.length, true);
  bytes.set(encoded, 4);
  return bytes;
}

/** Return the tensors of a message, which are its `inputs` or `outputs`. */
export async function tensorsOf(response, part) {
  const bytes = await response.arrayBuffer();
  let end = Number(response.headers.get("Inference-Header-Content-Length") || bytes.byteLength);
  const head = JSON.parse(new TextDecoder().decode(bytes.slice(0, end)));
  return head[part].map(({ name, datatype, shape, parameters }) => {
    const begin = end;
    end += parameters.binary_data_size;
    const own = bytes.slice(begin, end);
    const values = datatype === "BYTES" ? [new TextDecoder().decode(own.slice(4))] : new ARRAYS[datatype](own);
    return { name, datatype, shape, values };
  });
}

const single = new Float32Array(1), bitsOfSingle = new Uint32Array(single.buffer);

function fromBrain(bits) {
  bitsOfSingle[0] = bits << 16;
  return single[0];
}

function toBrain(number) {
  if (Number.isNaN(number)) return 0x7fc0;
  single[0] = number;
  const bits = bitsOfSingle[0];
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}
