'use strict';
/* The conversation: what was said, and an answer that grows. */

const chat = (() => {
  const SUGGESTIONS = ['Explain paged attention in three sentences', 'Write a haiku about memory bandwidth', 'List five uses of a radix tree'];
  const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed', 'repetition_penalty'];
  let messages = [];
  let running = null;

  const log = () => byId('messages');

  function settings() {
    const form = byId('settings-form').elements;
    const body = {};
    for (const name of NUMBERS) {
      if (form[name].value !== '') body[name] = Number(form[name].value);
    }
    if (form.stop.value) body.stop = form.stop.value;
    if (!form.thinking.checked) body.chat_template_kwargs = { enable_thinking: false };
    if (form.tools.value.trim()) body.tools = JSON.parse(form.tools.value);
    return body;
  }

  /** Whether the functions are a JSON list; says so if they are not. */
  function toolsAreValid() {
    const text = byId('tools').value.trim();
    let problem = '';
    try {
      if (text && !Array.isArray(JSON.parse(text))) problem = 'Functions must be a JSON list.';
    } catch (error) {
      problem = `Functions are no valid JSON: ${error.message}`;
    }
    byId('tools-error').textContent = problem;
    return !problem;
  }

  function send(text) {
    if (running || !text.trim()) return;
    if (!toolsAreValid()) {
      byId('settings').open = true;
      byId('tools').focus();
      return;
    }
    messages.push({ role: 'user', content: text });
    show(make('div', { class: 'message user' }, make('div', { class: 'body', text })));
    answer();
  }

  function show(element) {
    byId('welcome').hidden = true;
    log().append(element);
    log().scrollTop = log().scrollHeight;
  }

  async function answer() {
    const view = new Answer();
    show(view.element);
    running = new AbortController();
    setRunning(true);
    const system = byId('system').value.trim();
    const history = system ? [{ role: 'system', content: system }, ...messages] : [...messages];
    try {
      const body = { messages: history, stream: true, stream_options: { include_usage: true }, ...settings() };
      await api.stream('/v1/chat/completions', body, running.signal, (chunk) => view.take(chunk));
      view.end();
      byId('announcer').textContent = 'The answer is complete.';
    } catch (error) {
      const isStopped = error.name === 'AbortError';
      view.end(isStopped ? 'stopped' : null);
      if (!isStopped) view.fail(error.message);
      byId('announcer').textContent = isStopped ? 'Stopped.' : `The answer failed: ${error.message}`;
    }
    const said = view.message();
    if (said) messages.push(said);
    else takeBack();
    running = null;
    setRunning(false);
  }

  /** A question without an answer is no part of the conversation: its author may ask it otherwise. */
  function takeBack() {
    if (messages.at(-1)?.role !== 'user') return;
    const { content } = messages.pop();
    if (!byId('input').value) byId('input').value = content;
    grow();
  }

  function setRunning(isRunning) {
    const hadFocus = [byId('send'), byId('stop'), document.body].includes(document.activeElement);
    byId('send').hidden = isRunning;
    byId('stop').hidden = !isRunning;
    if (hadFocus) (isRunning ? byId('stop') : byId('input')).focus();
  }

  /** Returns a call's result to the model; once every call has one, it goes on. */
  function giveResult(call, result) {
    const calls = messages.findLast((message) => message.tool_calls)?.tool_calls ?? [];
    messages.push({ role: 'tool', tool_call_id: call.id, content: result });
    const answered = new Set(messages.filter((message) => message.role === 'tool').map((message) => message.tool_call_id));
    if (calls.every((one) => answered.has(one.id)) && !running) answer();
  }

  /** One answer on the page. Redrawn at most once a frame, however fast tokens come. */
  class Answer {
    constructor() {
      this.content = '';
      this.reasoning = '';
      this.calls = [];
      this.tokens = 0;
      this.sent = performance.now();
      this.first = null;
      this.finish = null;
      this.usage = null;
      this.pending = false;
      this.thinking = make('div');
      this.thought = make('details', { class: 'thinking', open: true, hidden: true }, make('summary', { text: 'Reasoning' }), this.thinking);
      this.text = make('div', { class: 'markdown caret' });
      this.callsBox = make('div');
      this.facts = make('div', { class: 'facts' });
      this.element = make('article', { class: 'message assistant', 'aria-label': 'Answer' }, this.thought, this.text, this.callsBox, this.facts);
    }

    take(chunk) {
      if (chunk.usage) this.usage = chunk.usage;
      for (const { delta, finish_reason: finish } of chunk.choices) {
        const isToken = delta.role === undefined && !finish;
        if (isToken) {
          this.first ??= performance.now();
          this.tokens += 1;
        }
        this.content += delta.content ?? '';
        this.reasoning += delta.reasoning_content ?? '';
        for (const call of delta.tool_calls ?? []) this.takeCall(call);
        if (finish) this.finish = finish;
      }
      this.redraw();
    }

    takeCall({ index, id, function: part }) {
      const call = (this.calls[index] ??= { id: '', type: 'function', function: { name: '', arguments: '' } });
      if (id) call.id = id;
      call.function.name += part?.name ?? '';
      call.function.arguments += part?.arguments ?? '';
    }

    redraw() {
      if (this.pending) return;
      this.pending = true;
      requestAnimationFrame(() => {
        this.pending = false;
        this.paint();
      });
    }

    paint() {
      const view = log();
      const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 80;
      this.thought.hidden = !this.reasoning;
      this.thinking.textContent = this.reasoning;
      this.text.replaceChildren(...markdown.blocks(this.content));
      if (!this.ended) {
        this.callsBox.replaceChildren(...this.calls.filter(Boolean).map((call) => callView(call)));
        this.facts.replaceChildren(...this.factsNow());
      }
      if (isAtEnd) view.scrollTop = view.scrollHeight;
    }

    factsNow() {
      const facts = [];
      const tokens = this.usage?.completion_tokens ?? this.tokens;
      if (tokens) facts.push(`${count(tokens)} tokens`);
      if (this.first) {
        facts.push(`first after ${seconds((this.first - this.sent) / 1000)}`);
        const time = ((this.last ?? performance.now()) - this.first) / 1000;
        if (this.tokens > 1 && time > 0) facts.push(`${((this.tokens - 1) / time).toFixed(1)} tokens/s`);
      }
      const cached = this.usage?.prompt_tokens_details?.cached_tokens;
      if (this.usage) facts.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? `, ${count(cached)} of it cached` : ''}`);
      const ends = { length: 'cut at the token limit', tool_calls: 'waits for results', stopped: 'stopped by you' };
      if (ends[this.finish]) facts.push(ends[this.finish]);
      return facts.map((text) => make('span', { text }));
    }

    end(finish) {
      this.last = performance.now();
      this.finish = finish ?? this.finish;
      this.text.classList.remove('caret');
      this.thought.open = !this.content && !this.calls.length;
      this.paint();
      this.callsBox.replaceChildren(...this.calls.filter(Boolean).map((call) => callView(call, giveResult)));
      this.ended = true;
    }

    fail(message) {
      this.element.append(make('div', { class: 'failure', role: 'alert', text: message }));
    }

    message() {
      const calls = this.calls.filter(Boolean);
      if (!this.content && !calls.length) return null;
      return { role: 'assistant', content: this.content, ...(calls.length && { tool_calls: calls }) };
    }
  }

  /** A call with its arguments; with `give`, a place for its result. */
  function callView(call, give) {
    let given = call.function.arguments;
    try {
      given = JSON.stringify(JSON.parse(given), null, 2);
    } catch { /* It is not whole yet. */ }
    const head = make('header', {}, 'Call of', make('code', { text: call.function.name }));
    const view = make('div', { class: 'call' }, head, make('pre', {}, make('code', { text: given })));
    if (give) {
      const input = make('input', { 'aria-label': `Result of ${call.function.name}`, placeholder: 'Its result', autocomplete: 'off' });
      const button = make('button', { type: 'submit', text: 'Return' });
      const form = make('form', {}, input, button);
      form.addEventListener('submit', (event) => {
        event.preventDefault();
        input.disabled = button.disabled = true;
        give(call, input.value);
      });
      view.append(form);
    }
    return view;
  }

  function clear() {
    running?.abort();
    messages = [];
    log().replaceChildren(byId('welcome'));
    byId('welcome').hidden = false;
    byId('input').focus();
  }

  function grow() {
    const input = byId('input');
    input.style.height = 'auto';
    input.style.height = `${Math.min(input.scrollHeight, 200)}px`;
  }

  function start() {
    const input = byId('input');
    byId('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      if (running) return;
      const text = input.value;
      if (toolsAreValid()) input.value = '';
      grow();
      send(text);
    });
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId('composer').requestSubmit();
      }
    });
    input.addEventListener('input', grow);
    byId('stop').addEventListener('click', () => running?.abort());
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') running?.abort();
    });
    byId('clear').addEventListener('click', clear);
    byId('tools').addEventListener('change', toolsAreValid);
    byId('settings-form').addEventListener('submit', (event) => event.preventDefault());
    byId('suggestions').append(...SUGGESTIONS.map((text) => make('button', { type: 'button', text, onclick: () => send(text) })));
    if (matchMedia('(max-width: 900px)').matches) byId('settings').open = false;
    input.focus();
  }

  return { start };
})();
