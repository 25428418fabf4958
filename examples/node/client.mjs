// A client of the wire protocol (docs/protocol.md) in Node: enqueue a prompt, follow its
// output. Nothing but a Redis library is needed.
//
//   cd examples/node && npm install
//   node client.mjs redis://:password@127.0.0.1:6379/0 smollm2-135m "Once upon a time"
//
// The address with its password is `url` in the file pool.json, whose path `tokenmill up`
// prints as it starts. TOKENMILL_URL is read when no address is given.
import { createHash, randomBytes } from "node:crypto";
import { createClient } from "redis";

const [url = process.env.TOKENMILL_URL, model = "smollm2-135m", text = "Once upon a time"] =
  process.argv.slice(2);
const TENANT = "default";
const SILENCE_MS = 5000; // after so long without a message the log is read again
const SHARED = ["load", "lanes", "recent", "deadline", "delayed", "bell", "limits", "rates"];

function crc32(bytes) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (0xedb88320 & -(crc & 1));
  }
  return ~crc >>> 0;
}

// Where a job goes: its id, its shard's prefix, and the keys that `enqueue` wants.
function place(pool, card) {
  const unique = Date.now().toString(16).padStart(11, "0") + randomBytes(10).toString("hex");
  const partition = crc32(Buffer.from(`${TENANT}\0${unique}`)) % pool.partitions;
  const id = `${model}.${partition}.${unique}`;
  const prefix = `tm:{${model}:${partition}}:`;
  const lane = crc32(Buffer.from(TENANT)) % 256;
  const tokens = Math.max(1, Math.round(Buffer.byteLength(text) / card.bytes_per_token));
  const fits = pool.buckets.find((bound) => tokens <= bound);
  return { id, partition, prefix, lane, tokens, bucket: fits ? String(fits) : "beyond" };
}

async function enqueue(redis, pool, at) {
  const payload = JSON.stringify({ text, sampling: { max_tokens: 48 } });
  const job = `${at.prefix}job:${at.id}`;
  const queue = `${at.prefix}q:interactive:${at.bucket}:${at.lane}`;
  const keys = [...SHARED.map((name) => at.prefix + name), job, `${at.prefix}in:${at.id}`, queue, job];
  const facts = {
    id: at.id,
    hash: createHash("sha256").update(payload).digest("hex"),
    tenant: TENANT,
    bucket: at.bucket,
    lane: at.lane,
    tokens: at.tokens,
    max_tokens: 48,
    seed: String(randomBytes(6).readUIntBE(0, 6)),
    keep_ms: pool.retention_ms,
  };
  const script = await redis.sendCommand(["HGET", "tm:scripts", "enqueue"]);
  await redis.sendCommand(["SADD", "tm:shards", `${model}:${at.partition}`]);
  const words = ["EVAL", script, String(keys.length), ...keys, "1", JSON.stringify(facts), payload];
  const [status, , , detail] = await redis.sendCommand(words);
  if (status !== "queued") throw new Error(`${status}: ${detail}`);
}

// Yields deltas in order, each once, up to the one with the end. The first call of
// `wake` comes from the subscription, so what is published while the log is read waits.
async function* deltas(redis, subscriber, at) {
  const heard = [];
  let ring = () => {};
  await subscriber.subscribe(`${at.prefix}wake:${at.id}`, (message) => {
    heard.push(JSON.parse(message));
    ring();
  });
  let last = "-";
  let readLog = true;
  for (let seen = 0; ; ) {
    let found = heard.splice(0);
    if (readLog) {
      const entries = await redis.sendCommand(["XRANGE", `${at.prefix}tok:${at.id}`, last, "+"]);
      found = entries.filter(([, fields]) => fields[0] === "d").map(([, fields]) => JSON.parse(fields[1]));
      if (entries.length) last = `(${entries.at(-1)[0]}`;
      readLog = false;
      if (!found.length) {
        const out = await redis.sendCommand(["GET", `${at.prefix}out:${at.id}`]);
        if (out) {
          const { state, error } = JSON.parse(out); // it ended before it ran
          found = [{ end: { state, error } }];
        }
      }
    }
    for (const delta of found) {
      const { offset = 0, token_ids: ids = [] } = delta;
      if (offset > seen) {
        readLog = true; // something was missed
        break;
      }
      if (offset + ids.length > seen || delta.end) {
        seen = Math.max(seen, offset + ids.length);
        yield delta;
      }
      if (delta.end) return;
    }
    if (!readLog && !heard.length) {
      readLog = await new Promise((resolve) => {
        const timer = setTimeout(() => resolve(true), SILENCE_MS);
        ring = () => {
          clearTimeout(timer);
          resolve(false);
        };
      });
      ring = () => {};
    }
  }
}

const redis = await createClient({ url }).connect();
const subscriber = await redis.duplicate().connect();
try {
  const pool = JSON.parse(await redis.sendCommand(["GET", "tm:pool"]));
  const card = JSON.parse(await redis.sendCommand(["HGET", "tm:models", model]));
  const at = place(pool, card);
  await enqueue(redis, pool, at);
  for await (const delta of deltas(redis, subscriber, at)) {
    process.stdout.write(delta.text ?? "");
    if (delta.end) {
      process.stdout.write(`\n[${delta.end.state}]\n`);
      process.exitCode = delta.end.state === "succeeded" ? 0 : 1;
    }
  }
} finally {
  subscriber.destroy();
  redis.destroy();
}
