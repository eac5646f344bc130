// The server's API, with the key that the page was given. The key lives in this variable and nowhere else.

let key = null;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.body = body;
  }
}

export function setKey(value) {
  key = value;
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => null));
  return response;
}

export async function get(path) {
  return (await request(path)).json();
}

// The events of a streamed answer, one object each. An event with an error is thrown.
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(response.status, event);
      yield event;
    }
  }
}
