// Server-sent events over fetch, since EventSource supports neither headers nor a body.

/**
 * Yields the events of a response until it ends.
 * @param {Response} response
 * @yields {{name: string, data: any}} data is parsed JSON
 */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value.replaceAll("\r", "");
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // aborts the request if the caller stops early
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length === 0 ? null : { name, data: JSON.parse(data.join("\n")) };
}

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 8000;
const IDLE_TIMEOUT_MS = 15000; // the service sends at least one event per second

/**
 * Keeps a stream open while the page is open, and reconnects with exponential backoff.
 * @param {(signal: AbortSignal) => Promise<Response>} open throws if the stream cannot be opened
 * @param {(event: {name: string, data: any}) => void} onEvent
 * @param {(state: "live" | "lost", error: Error | null) => Promise<void> | void} onState
 *   awaited before the next attempt
 */
export async function follow(open, onEvent, onState) {
  let retryMs = FIRST_RETRY_MS;
  for (;;) {
    const controller = new AbortController();
    let timer = startIdleTimer(controller);
    let error = null;
    try {
      const response = await open(controller.signal);
      for await (const event of eventsOf(response)) {
        clearTimeout(timer);
        timer = startIdleTimer(controller);
        retryMs = FIRST_RETRY_MS;
        onState("live", null);
        onEvent(event);
      }
    } catch (caught) {
      error = caught;
    }
    clearTimeout(timer);
    await onState("lost", error);
    await new Promise((resolve) => setTimeout(resolve, retryMs * (0.75 + Math.random() / 2)));
    retryMs = Math.min(2 * retryMs, MAX_RETRY_MS);
  }
}

/** Aborts the connection if no event arrives in time. */
function startIdleTimer(controller) {
  return setTimeout(() => controller.abort(), IDLE_TIMEOUT_MS);
}
