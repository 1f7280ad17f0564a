// Shows each snapshot of the server.
import { Charts } from "./charts.js";
import { Feeds } from "./feeds.js";
import { $, ask, get, say, watch } from "./link.js";
import { Strip, milliseconds, round } from "./strip.js";
import * as tables from "./tables.js";

const PRODUCTS = { policies: "robot policies", llm: "language model", functions: "functions", feeds: "cameras and videos" };

let strip = null, charts = null, policies = null, feeds = null;

function begin() {
  document.querySelector("main").hidden = false;
  strip = new Strip($("strip"), $("about"), $("legend"));
  charts = new Charts($("charts"));
  policies = new tables.Policies($("policies"), ask);
  feeds = new Feeds($("feeds"), get);
  const spans = [[0.5, "½ s"], [2, "2 s"], [10, "10 s"], [30, "30 s"]];
  $("spans").replaceChildren(...spans.map(([seconds, text]) => {
    const made = Object.assign(document.createElement("button"), { textContent: text });
    made.setAttribute("aria-pressed", String(seconds === strip.span));
    made.addEventListener("click", () => {
      strip.span = seconds;
      for (const other of $("spans").children) other.setAttribute("aria-pressed", String(other === made));
    });
    return made;
  }));
  $("pause").addEventListener("click", () => {
    strip.pause(!strip.paused);
    $("pause").setAttribute("aria-pressed", String(strip.paused));
    $("pause").textContent = strip.paused ? "Go on" : "Pause";
  });
}

let last = null; // the snapshot before
let predicts = false; // whether a batch has had a predicted time

function show(snapshot) {
  if (strip === null) begin();
  const { server } = snapshot;
  const what = server.model?.model ?? PRODUCTS[server.product] ?? server.product;
  $("product").textContent = `${what} · ${server.version}`;
  $("state").textContent = server.error ? `${server.state}: ${server.error}` : server.state;
  $("state").className = `pill ${server.state === "ready" ? "good" : "warn"}`;
  document.title = `Reflex ${server.state === "ready" ? "" : server.state}`;
  strip.add(snapshot);
  charts.add(snapshot);
  tiles(snapshot, tables.served(snapshot));
  if (!strip.paused) tables.batches($("batches"), snapshot);
  feeds.show(snapshot);
  $("columns").textContent = `One column is one batch, one cell one ${server.feeds ? "frame" : "request"}, in the colour of its ${server.feeds ? "feed" : "client"}.`;
  $("callers").hidden = server.feeds !== undefined; // the table of feeds has them
  tables.clients($("clients"), $("known"), snapshot);
  tables.queues($("queues"), snapshot);
  tables.processes($("processes"), snapshot);
  policies.show(server);
  if (last !== null && snapshot.number > last.number + 1) say(`live, ${snapshot.number - last.number - 1} snapshots missed`, "warn");
  else say("live", "good");
  last = snapshot;
}

function tiles(snapshot, groups) {
  const sum = (key) => groups.reduce((total, g) => total + g[key], 0);
  const worst = (key) => groups.reduce((most, g) => (g[key] === null ? most : Math.max(most ?? 0, g[key])), null);
  const sizes = snapshot.batches.map((b) => b.size);
  const queues = Object.values(snapshot.server.queues ?? {});
  const work = queues.reduce((total, q) => total + (q.queued_seconds ?? 0), 0);
  const model = snapshot.server.model;
  const speaks = groups.some((g) => g.first_p50 !== null || g.tokens > 0);
  predicts ||= groups.some((g) => g.error !== null);
  const embeds = model?.dimensions !== undefined; // makes vectors: no tokens, and no cache
  const part = snapshot.server.product === "functions" ? "part" : "token"; // of a stream
  const tokens = embeds || (!speaks && !model) ? [] : [
    [`${part}s a second`, round(sum("tokens"))],
    [`first ${part}, p50`, milliseconds(worst("first_p50"))],
    [`first ${part}, p99`, milliseconds(worst("first_p99"))],
    [`between ${part}s, p50`, milliseconds(worst("gap_p50"))],
    [`between ${part}s, p99`, milliseconds(worst("gap_p99"))],
    ...(model ? [
      ["running", String(model.running ?? "–")],
      ["cache held", model.kv_cache_usage === undefined ? "–" : `${Math.round(100 * model.kv_cache_usage)} %`],
    ] : []),
  ];
  const told = [
    ...tokens,
    ["answers a second", round(sum("rate"))],
    ["requests a batch", sizes.length ? round(sizes.reduce((a, b) => a + b, 0) / sizes.length) : "–"],
    ["device busy", `${Math.round(100 * Math.min(1, snapshot.groups.reduce((total, g) => total + g.busy, 0)))} %`],
    ["p50", milliseconds(worst("p50"))],
    ["p99", milliseconds(worst("p99"))],
    ["waiting", String(queues.reduce((total, q) => total + q.queued, 0))],
    ...(predicts ? [["predicted work", milliseconds(work)]] : []),
    ["without a result", String(groups.reduce((n, g) => n + Object.entries(g.outcomes).reduce((m, [kind, k]) => (kind === "ok" ? m : m + k), 0), 0))],
  ];
  if (snapshot.left_out) told.push(["batches not shown", String(snapshot.left_out)]);
  $("tiles").replaceChildren(...told.map(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
    return tile;
  }));
}

watch(show, () => { last = null; });
