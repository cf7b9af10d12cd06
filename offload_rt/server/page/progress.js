/** Where a request is, in words: waiting, reading, answering; with speed and time left. */

const SAMPLE_MS = 250;
const FIRST_ESTIMATE_MS = 2000;
const RATE_WINDOW_MS = 10_000;

const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Seconds in words: "5 s", "3 min", "1 h 20 min". */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
}

/**
 * Predicts how long reading a prompt takes from the server's `prompt_progress`.
 *
 * The time per token grows with the number of tokens before it, because each attends to all of them. So the cost of a token is
 * taken to be linear in its position, and fitted to the earlier and the later half of what was read.
 */
export class ReadingTime {
  #samples = [];

  add({processed, time_ms}) {
    const last = this.#samples.at(-1);
    if (!last || time_ms >= last.time + SAMPLE_MS) this.#samples.push({processed, time: time_ms});
  }

  /** Returns the milliseconds from the last sample to the end; null while it is too early to tell. */
  left(total) {
    const first = this.#samples[0], last = this.#samples.at(-1);
    if (!first || last.time - first.time < FIRST_ESTIMATE_MS || last.processed <= first.processed) return null;
    const half = (first.processed + last.processed) / 2;
    const middle = this.#samples.find(sample => sample.processed >= half);
    const whole = cost(first, last), earlier = cost(first, middle), later = cost(middle, last);
    const rest = total - last.processed;
    if (earlier === null || later === null) return whole.ms * rest;
    const slope = Math.max(0, (later.ms - earlier.ms) / (later.at - earlier.at));
    const now = later.ms + slope * (last.processed - later.at);
    return now * rest + slope * rest * rest / 2;
  }
}

/** Returns the milliseconds per token between two samples, and the position in the middle; null if nothing was read. */
function cost(from, to) {
  const tokens = to.processed - from.processed;
  return tokens > 0 ? {ms: (to.time - from.time) / tokens, at: (from.processed + to.processed) / 2} : null;
}

/** Measures tokens per second over the last seconds. */
export class TokenRate {
  #times = [];

  add(now) { this.#times.push(now); }

  /** Returns tokens per second; null while there are too few. */
  perSecond(now) {
    this.#times = this.#times.filter(time => time > now - RATE_WINDOW_MS);
    const elapsed = now - this.#times[0];
    return elapsed >= 1000 && this.#times.length > 1 ? (this.#times.length - 1) * 1000 / elapsed : null;
  }
}

/** Follows the events of one request. Times are in milliseconds of `performance.now()`. */
export class RequestProgress {
  #phase = "sent";
  #ahead = 0;
  #reading = new ReadingTime();
  #read = null;
  #readAt = 0;
  #rate = new TokenRate();
  #tokens = 0;

  add(event, now) {
    if (event.queue) {
      this.#phase = "waiting";
      this.#ahead = event.queue.position;
    } else if (event.prompt_progress) {
      this.#phase = "reading";
      this.#read = event.prompt_progress;
      this.#readAt = now;
      this.#reading.add(this.#read);
    } else if (event.choices?.length) {
      this.#phase = "answering";
      if (event.choices[0].finish_reason) return;
      this.#rate.add(now);
      this.#tokens += 1;
    }
  }

  /** The part of the prompt that has been read, from 0 to 1; null unless the prompt is being read. */
  get part() {
    return this.#phase === "reading" ? this.#read.processed / this.#read.total : null;
  }

  /** What to say aloud; changes with the phase, and not with every token. */
  get spoken() {
    return {sent: "Sent.", waiting: this.#waiting, reading: "Reading the prompt.", answering: "Answering."}[this.#phase];
  }

  /** What to show at a time. */
  shown(now) {
    if (this.#phase === "sent") return "Sent; waiting for the server …";
    if (this.#phase === "waiting") return this.#waiting;
    if (this.#phase === "answering") {
      const rate = this.#rate.perSecond(now);
      return `Answering: ${counted(this.#tokens, "token")}${rate === null ? "" : `, ${rate.toFixed(1)} tokens/s`}`;
    }
    const {total, cache, processed} = this.#read;
    if (processed >= total) return `Read ${counted(total, "token")}; beginning the answer …`;
    const left = this.#reading.left(total);
    const cached = cache ? ` (${cache.toLocaleString("en")} cached)` : "";
    const remaining = left === null ? "" : `, about ${duration((left - (now - this.#readAt)) / 1000)} left`;
    return `Reading: ${processed.toLocaleString("en")} of ${counted(total, "token")}${cached}${remaining}`;
  }

  get #waiting() {
    return this.#ahead ? `Waiting: ${counted(this.#ahead, "request")} before you.` : "Waiting: you are next.";
  }
}

/** The server's `timings` in words. */
export function timingsInWords({prompt_n, cache_n, prompt_ms, predicted_n, predicted_per_second, draft_n, draft_n_accepted}) {
  const accepted = draft_n ? `, ${Math.round(100 * draft_n_accepted / draft_n)} % of drafts accepted` : "";
  return `${counted(predicted_n, "token")} at ${predicted_per_second.toFixed(1)} tokens/s${accepted}; ` +
    `${counted(prompt_n, "prompt token")} read in ${(prompt_ms / 1000).toFixed(1)} s, ${cache_n.toLocaleString("en")} cached`;
}
