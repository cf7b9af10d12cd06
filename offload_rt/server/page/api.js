/** Requests to this server, whose refusals become errors with the words that it gives. */

let key = "";

export function useKey(value) { key = value; }

/** A refusal by the server; `status` is that of HTTP. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Sends `body` as JSON, or asks for `path` if there is none, and returns the response. */
export async function call(path, body, signal) {
  const headers = {};
  // Headers carry bytes: the key's in UTF-8.
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await inWords(
    fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal}),
    "The server does not answer: is offload-rt serve still running?",
  );
  if (response.ok) return response;
  let message = `The server answers ${response.status} ${response.statusText}.`;
  try { message = (await response.json()).error.message; } catch { /* not JSON */ }
  throw new Refusal(message, response.status);
}

/** Yields the objects of a stream of server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const {value, done} = await inWords(reader.read(), "The connection to the server was lost.");
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refusal(event.error.message, response.status);
      yield event;
    }
  }
}

/** Browsers describe a broken connection in words of their own ("Failed to fetch"). */
async function inWords(promise, message) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(message);
  }
}
