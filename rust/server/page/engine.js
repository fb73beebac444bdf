'use strict';
/* The live view of the engine: asks once a second while somebody looks, and draws. */

const engine = (() => {
  const EVERY = 1000;
  const SPAN = 120;
  const STATES = [['private', 'one request'], ['shared', 'several requests'], ['cached', 'cached prefix'], ['free', 'free']];
  let history = [];
  let cellAt = () => null;
  let last = null;
  let timer = null;

  const legend = (entries) => entries.map(([paint, text]) => make('li', {}, make('span', { class: 'swatch', color: `var(--${paint})` }), text));

  async function poll() {
    clearTimeout(timer);
    try {
      last = await api.json(`/engine/state?engine=${byId('engine-number').value || 0}`);
      offerEngines(last.engines);
      history = history.filter(({ at }) => at > performance.now() - SPAN * 1000);
      const { generation_tokens: output, prompt_tokens: prompt } = last.metrics;
      /* Another server under the same address counts from 0 again. */
      if (history.length && output < history.at(-1).output) history = [];
      history.push({ at: performance.now(), output, prompt });
      setStatus(last.status, last.model);
    } catch (error) {
      setStatus('unreachable', last?.model);
      notice(`The server does not answer: ${error.message}`);
      timer = setTimeout(poll, 2 * EVERY);
      return;
    }
    if (!byId('panel-engine').hidden && !document.hidden) show();
    if (!document.hidden) timer = setTimeout(poll, byId('panel-engine').hidden ? 5 * EVERY : EVERY);
  }

  function offerEngines(count) {
    const select = byId('engine-number');
    if (select.options.length !== count) select.replaceChildren(...Array.from({ length: count }, (_, i) => make('option', { value: i }, String(i))));
    byId('engine-choice').hidden = count < 2;
  }

  function setStatus(status, model) {
    const element = byId('status');
    if (element.textContent !== status) element.textContent = status;
    element.dataset.status = status;
    byId('model-name').textContent = model ?? '';
    byId('model-name').title = model ?? '';
  }

  function notice(text) {
    byId('engine-notice').hidden = !text;
    if (byId('engine-notice').textContent !== text) byId('engine-notice').textContent = text;
  }

  function show() {
    const { status, engine: picture } = last;
    const reasons = { loading: 'The model is being loaded. This view fills in as soon as it is there.', restarting: 'The engine is being restarted; requests go on afterwards. What is shown is its last picture.' };
    notice(reasons[status] ?? '');
    tiles();
    charts.line(byId('speed'), rates('output'), SPAN, `Output tokens a second, now ${count(rate('output', 5))}`);
    latency('ttft', last.metrics.time_to_first_token);
    latency('itl', last.metrics.inter_token_latency);
    if (!picture) return;
    pool(picture);
    tree(picture);
    steps(picture.steps);
    limit(picture.steps);
    const [longest, total] = picture.held_us;
    byId('cost').textContent = `Drawing this held the engine's control plane for ${longest.toFixed(0)} µs at a time, ${total.toFixed(0)} µs in all; no step waited longer.`;
  }

  /** Mean rate of a counter over the last `span` seconds. */
  function rate(name, span) {
    const now = history.at(-1);
    const then = history.find(({ at }) => at >= now.at - span * 1000) ?? now;
    return now.at > then.at ? ((now[name] - then[name]) / (now.at - then.at)) * 1000 : 0;
  }

  function rates(name) {
    const now = performance.now();
    return history.slice(1).map((reading, place) => {
      const before = history[place];
      return [(now - reading.at) / 1000, ((reading[name] - before[name]) / (reading.at - before.at)) * 1000];
    });
  }

  function tiles() {
    const { metrics, engine: picture, max_num_seqs: slots } = last;
    const stats = picture?.stats;
    const hits = stats?.query_tokens ? stats.hit_tokens / stats.query_tokens : null;
    const used = stats ? stats.num_blocks - stats.free_blocks - stats.evictable_blocks : 0;
    const rows = [
      ['Output', count(rate('output', 5)), 'tokens/s', `${count(metrics.generation_tokens)} since the start`],
      ['Prompts', count(rate('prompt', 5)), 'tokens/s', `${count(metrics.prompt_tokens)} since the start`],
      ['Running', stats ? count(stats.num_running) : '–', slots ? `of ${count(slots)}` : '', stats ? `${count(stats.num_waiting)} waiting` : ''],
      ['KV cache in use', stats ? percent(used / Math.max(1, stats.num_blocks)) : '–', '', stats ? `${bytes(stats.used_bytes)} of ${bytes(stats.num_blocks * picture.bytes_per_block)}` : ''],
      ['Prefix hits', hits === null ? '–' : percent(hits), '', stats ? `${count(stats.hit_tokens)} tokens not computed` : ''],
      ['First token', seconds(charts.quantile(metrics.time_to_first_token, 0.5)), 'median', `95th: ${seconds(charts.quantile(metrics.time_to_first_token, 0.95))}`],
      ['Between tokens', seconds(charts.quantile(metrics.inter_token_latency, 0.5)), 'median', `95th: ${seconds(charts.quantile(metrics.inter_token_latency, 0.95))}`],
      ['Engine restarts', count(metrics.engine_restarts), '', stats ? `${count(stats.preemptions)} preemptions` : ''],
    ];
    byId('tiles').replaceChildren(...rows.map(([name, value, unit, under]) => make('div', { class: 'tile' },
      make('dt', { text: name }), make('dd', {}, value, unit && make('small', { text: ` ${unit}` })), make('dd', { class: 'under', text: under }))));
  }

  function pool({ map, stats, block_size: size }) {
    const sums = map.cells.reduce((sum, cell) => sum.map((one, at) => one + cell[at]), [0, 0, 0, 0]);
    const by = { free: sums[0], private: sums[1], shared: sums[2], cached: sums[3] };
    byId('pool-note').textContent = `${count(stats.num_blocks)} blocks of ${size} tokens, in the order of their ids`
      + (map.blocks_per_cell > 1 ? `, ${map.blocks_per_cell} to a cell.` : '.');
    byId('pool-legend').replaceChildren(...legend(STATES.map(([name, text]) => [name, `${text}: ${count(by[name])}`])));
    const canvas = byId('pool');
    canvas.setAttribute('aria-label', `Block pool: ${STATES.map(([name, text]) => `${count(by[name])} ${text}`).join(', ')}.`);
    cellAt = charts.pool(canvas, map);
  }

  function hover(event) {
    const place = last?.engine ? cellAt(event.offsetX, event.offsetY) : null;
    if (place === null) {
      byId('pool-hover').textContent = '';
      return;
    }
    const { map } = last.engine;
    const [free, own, shared, cached] = map.cells[place];
    const first = 1 + place * map.blocks_per_cell;
    const which = map.blocks_per_cell > 1 ? `Blocks ${count(first)} to ${count(first + free + own + shared + cached - 1)}` : `Block ${count(first)}`;
    const parts = [[own, 'one request'], [shared, 'several requests'], [cached, 'cached'], [free, 'free']].filter(([many]) => many);
    byId('pool-hover').textContent = `${which}: ${parts.map(([many, text]) => (map.blocks_per_cell > 1 ? `${many} ${text}` : text)).join(', ')}`;
  }

  function tree({ tree: view, block_size: size }) {
    const more = view.edges - view.largest.length;
    byId('tree-note').textContent = `${count(view.blocks)} blocks on ${count(view.leaves)} paths, the longest ${count(view.depth * size)} tokens`
      + (more > 0 ? `; ${count(more)} smaller branches are not drawn.` : '.');
    byId('tree-legend').replaceChildren(...legend([['private', 'in use by requests'], ['cached', 'cached, may be evicted']]));
    charts.tree(byId('tree'), view, size, byId('tree-note').textContent);
  }

  function steps(list) {
    const latest = list.at(-1);
    byId('steps-note').textContent = latest
      ? `Step ${count(latest.id)}: ${count(latest.decode_rows)} sequences got a token, ${count(latest.prefill_tokens)} prompt tokens were computed, in ${seconds(latest.duration_us / 1e6)}.`
      : '';
    byId('steps-legend').replaceChildren(...legend([['decode', 'decode tokens'], ['prefill', 'prefill tokens'], ['time', 'duration']]));
    charts.steps(byId('steps'), list, `Tokens of the latest steps. ${byId('steps-note').textContent}`);
    if (!document.querySelector('.table').open) return;
    const head = ['step', 'decode rows', 'decode tokens', 'prefill rows', 'prefill tokens', 'KV read', 'took'];
    const row = (one) => [one.id, one.decode_rows, one.decode_tokens, one.prefill_rows, one.prefill_tokens].map(count).concat(bytes(one.kv_bytes), seconds(one.duration_us / 1e6));
    const body = list.slice(-40).reverse().map((one) => make('tr', {}, ...row(one).map((text) => make('td', { text }))));
    byId('steps-table').replaceChildren(make('table', {}, make('thead', {}, make('tr', {}, ...head.map((text) => make('th', { scope: 'col', text })))), make('tbody', {}, ...body)));
  }

  function latency(id, buckets) {
    const [middle, high] = [0.5, 0.95].map((share) => seconds(charts.quantile(buckets, share)));
    const total = buckets.counts.reduce((sum, one) => sum + one, 0);
    byId(`${id}-note`).textContent = total ? `${count(total)} since the start; median ${middle}, 95th percentile ${high}.` : '';
    charts.histogram(byId(id), buckets, `${byId(`h-${id}`).textContent}: ${byId(`${id}-note`).textContent}`);
  }

  /** Bytes that the latest decode steps had to read, over the bandwidth, against what they took. */
  function limit(list) {
    const { weight_bytes: weights, read_bandwidth: bandwidth } = last;
    const decodes = list.filter((one) => one.decode_tokens && !one.prefill_tokens).slice(-64);
    const needed = decodes.map((one) => weights + one.kv_bytes);
    const holder = byId('limit');
    const sum = (values) => values.reduce((total, one) => total + one, 0);
    const text = (...lines) => holder.replaceChildren(...lines.map((line) => make('p', { class: 'note', text: line })));
    const measured = sum(decodes.map((one) => one.duration_us)) / 1e6 / Math.max(1, decodes.length);
    if (weights === null) return text('Not known for this model: which of its experts a step reads depends on the tokens.');
    const which = decodes.length === 1 ? 'The latest decode step' : `The latest ${decodes.length} decode steps`;
    const reads = decodes.length ? `${which} had to read ${bytes(sum(needed) / decodes.length)}${decodes.length === 1 ? '' : ' each'} and took ${seconds(measured)}: ${bytes(sum(needed) / decodes.length / measured)}/s.` : 'No decode step yet.';
    if (bandwidth === null) return text(reads, 'Not calibrated: the read bandwidth of this device has not been measured, so there is no limit to compare with. On a processor, octavo bench latency measures and keeps it.');
    if (!decodes.length) return text(reads, `Memory was measured to deliver ${bytes(bandwidth)}/s.`);
    const share = sum(needed) / bandwidth / (measured * decodes.length);
    const bar = make('div');
    bar.style.width = `${Math.min(100, share * 100)}%`;
    holder.replaceChildren(
      make('p', { class: 'limit-value', text: `${percent(share)} of the limit` }),
      make('div', { class: 'gauge', role: 'meter', 'aria-label': 'Share of the limit', 'aria-valuemin': '0', 'aria-valuemax': '100', 'aria-valuenow': String(Math.round(share * 100)) }, bar),
      make('p', { class: 'note', text: reads }),
      make('p', { class: 'note', text: `Memory was measured to deliver ${bytes(bandwidth)}/s, so a step cannot take less than ${seconds(sum(needed) / decodes.length / bandwidth)}.` }),
    );
  }

  function start() {
    byId('engine-number').addEventListener('change', poll);
    byId('pool').addEventListener('pointermove', hover);
    byId('pool').addEventListener('pointerleave', () => { byId('pool-hover').textContent = ''; });
    document.addEventListener('visibilitychange', () => { if (!document.hidden) poll(); });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => last && !byId('panel-engine').hidden && show());
    addEventListener('resize', () => last && !byId('panel-engine').hidden && show());
    poll();
  }

  return { start, poll };
})();
