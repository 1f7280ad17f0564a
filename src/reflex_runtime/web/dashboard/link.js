// The link of a page to its server: the key, which stays in this tab and is sent in a header, never in an address, and
// the stream of snapshots. Addresses are relative to this file, so that pages also work behind a proxy that adds a prefix.
const AGAIN = 1000; // milliseconds until the next try
const SILENT = 5000; // milliseconds without a snapshot after which the connection counts as lost
const at = (path) => new URL(`..${path}`, import.meta.url);
export const $ = (id) => document.getElementById(id);

function headers() {
  const key = sessionStorage.getItem("reflex-key");
  return key ? { "X-Reflex-Key": key } : {};
}

export function say(text, kind) {
  $("link").textContent = text;
  $("link").className = `pill ${kind}`;
}

export function get(path, signal) {
  return fetch(at(path), { headers: headers(), signal, cache: "no-store" });
}

// Returns "done", or why it is not.
export async function ask(path, fields, method = "POST") {
  try {
    const body = fields === undefined ? undefined : JSON.stringify(fields);
    const answer = await fetch(at(path), { method, headers: { ...headers(), "Content-Type": "application/json" }, body });
    return answer.ok ? "done" : (await answer.json()).message;
  } catch (error) {
    return `not sent: ${error.message}`;
  }
}

let turn = 0; // of the only watch that goes on

// show: gets each snapshot. lost: called when the stream broke; it is opened again.
export async function watch(show, lost = () => {}) {
  const mine = ++turn;
  const given = new AbortController();
  let alarm = null;
  const alive = () => { clearTimeout(alarm); alarm = setTimeout(() => given.abort(), SILENT); };
  try {
    alive();
    const answer = await get("/dashboard/stream", given.signal);
    if (answer.status === 401) {
      askForKey(() => watch(show, lost));
      return;
    }
    if (!answer.ok) throw new Error((await answer.json()).message);
    $("key").hidden = true;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (mine !== turn) return reader.cancel();
      if (done) throw new Error("the server ended the stream");
      alive();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) show(JSON.parse(line));
    }
  } catch (error) {
    if (mine !== turn) return;
    lost();
    say(`not connected: ${error.name === "AbortError" ? "nothing came for five seconds" : error.message}`, "bad");
    setTimeout(() => { if (mine === turn) watch(show, lost); }, AGAIN);
  } finally {
    clearTimeout(alarm);
  }
}

function askForKey(then) {
  $("key").hidden = false;
  $("refused").textContent = sessionStorage.getItem("reflex-key") ? "The server did not take this key." : "";
  say("the key is needed", "warn");
  $("key").onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem("reflex-key", new FormData(event.target).get("key"));
    then();
  };
}
