// Shows the details of what is clicked, tapped or focused. Arrow keys move the focus, so all tokens together are one stop.
// A new drawing of the text would lose the focus, so the token in the same place takes it again.
const all = () => [...element.querySelectorAll('[data-details]')];
let last = null;
const show = (one) => {
  all().forEach(each => { each.classList.toggle('chosen', each === one); each.tabIndex = each === one ? 0 : -1; });
  element.querySelector('.details-panel').textContent = one.dataset.details;
  last = {index: all().indexOf(one), count: all().length, hasFocus: element.contains(document.activeElement)};
};
const choose = (one) => { show(one); if (one.dataset.step) trigger('select', {step: Number(one.dataset.step)}); };
const under = (event) => event.target.closest && event.target.closest('[data-details]');
element.addEventListener('click', (event) => { const one = under(event); if (one) { one.focus(); choose(one); } });
element.addEventListener('focusin', (event) => { const one = under(event); if (one) show(one); });
element.addEventListener('keydown', (event) => {
  const one = under(event);
  if (!one) return;
  const move = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (move) { const next = all()[all().indexOf(one) + move]; if (next) next.focus(); }
  else if (event.key === 'Enter' || event.key === ' ') choose(one);
  else return;
  event.preventDefault();
});
watch('value', () => {
  const one = last && all().length === last.count && element.dataset.keeps ? all()[last.index] : null;
  if (!one) { last = null; return; }
  const {hasFocus} = last;
  show(one);
  if (hasFocus) one.focus({preventScroll: true});
});
