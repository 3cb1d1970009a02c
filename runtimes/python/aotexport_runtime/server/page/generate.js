// Texts on the page: a prompt is sent to OpenAI's routes, and its answer is shown piece by piece.

const at = (id) => document.getElementById(id);
const url = (path) => new URL(path, document.baseURI).href;

let running = null; // what ends the text that is generated

/** Show the form of a model that generates, and the names by which it and its adapters are asked. */
export async function showTexts(model) {
  const { data } = await (await fetch(url("v1/models"))).json();
  const names = data.map(({ id }) => id).filter((id) => id === model || id.startsWith(`${model}:`));
  at("adapter").replaceChildren(...names.map((name) => new Option(name)));
  at("written").textContent = at("texts-took").textContent = at("texts-error").textContent = "";
  at("texts").hidden = false;
}

/** End the text that is generated, if one is. */
export const stopTexts = () => running?.abort();

async function generate(event) {
  event.preventDefault();
  stopTexts();
  const own = running = new AbortController(), isChat = at("is-chat").checked, prompt = at("prompt").value;
  const asked = { model: at("adapter").value, stream: true, max_tokens: Number(at("most").value),
    temperature: Number(at("temperature").value), stream_options: { include_usage: true },
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }) };
  at("written").textContent = at("texts-error").textContent = "";
  at("texts-took").textContent = "Generating …";
  at("stop").disabled = false;
  const began = performance.now();
  let first = 0, tokens = 0;
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    for await (const piece of events(await fetch(url(path), { method: "POST", body: JSON.stringify(asked), signal: own.signal }))) {
      if (piece.error) throw new Error(piece.error.message);
      first ||= performance.now() - began;
      tokens = piece.usage?.completion_tokens ?? tokens;
      const choice = piece.choices[0];
      at("written").append(choice?.text ?? choice?.delta?.content ?? "");
    }
    const took = performance.now() - began;
    at("texts-took").textContent = `${tokens} tokens in ${took.toFixed(0)} ms, the first after ${first.toFixed(0)} ms.`;
  } catch (error) {
    at("texts-took").textContent = own.signal.aborted ? "Stopped." : "";
    at("texts-error").textContent = own.signal.aborted ? "" : error.message;
  } finally {
    if (own === running) at("stop").disabled = true;
  }
}

/** Yield what a stream of server-sent events has; one that is refused is an event too. */
async function* events(response) {
  if (!response.ok) return yield await response.json();
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    yield* parts.map((part) => part.slice("data: ".length)).filter((part) => part !== "[DONE]").map((part) => JSON.parse(part));
  }
}

at("texts").addEventListener("submit", generate);
at("stop").addEventListener("click", stopTexts);
