'use strict';
/* Elements from data. Text becomes text nodes and nothing else: no string is ever parsed as markup. */

const SVG = 'http://www.w3.org/2000/svg';

/** An element: `properties` are attributes, listeners (`onclick`) or, for `class` and `text`, what they say. */
function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG. */
function draw(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') element.textContent = value;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'color') element.style.background = value;
    else if (name === 'paint') element.style.fill = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

const count = (number) => Math.round(number).toLocaleString('en');

function bytes(number) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${number < 10 && unit > 0 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

/** Seconds in the unit in which they read best. */
function seconds(number) {
  if (!Number.isFinite(number)) return '–';
  if (number < 0.001) return `${(number * 1e6).toFixed(0)} µs`;
  if (number < 0.0995) return `${(number * 1e3).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 1) return `${(number * 1e3).toFixed(0)} ms`;
  return `${number < 9.95 ? +number.toFixed(1) : Math.round(number)} s`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return '< 0.1 %';
  return `${share > 0 && share < 0.0995 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;
}
