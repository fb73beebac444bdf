'use strict';
/* Tabs, and the start of everything. */

(() => {
  const tabs = [...document.querySelectorAll('[role="tab"]')];

  function select(tab, moveFocus) {
    for (const one of tabs) {
      const isSelected = one === tab;
      one.setAttribute('aria-selected', String(isSelected));
      one.tabIndex = isSelected ? 0 : -1;
      byId(one.getAttribute('aria-controls')).hidden = !isSelected;
    }
    if (moveFocus) tab.focus();
    const name = tab.id.replace('tab-', '');
    history.replaceState(null, '', name === 'chat' ? location.pathname : `#${name}`);
    if (name === 'engine') engine.poll();
  }

  tabs.forEach((tab, place) => {
    tab.addEventListener('click', () => select(tab));
    tab.addEventListener('keydown', (event) => {
      const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: -1 };
      if (event.key in moves) {
        event.preventDefault();
        select(tabs.at(moves[event.key] % tabs.length), true);
      }
    });
  });

  byId('key-button').addEventListener('click', () => {
    api.forgetKey();
    engine.poll();
  });

  chat.start();
  engine.start();
  if (location.hash === '#engine') select(byId('tab-engine'));
})();
