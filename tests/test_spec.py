import keyword
import types

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomp import spec


def top_k(fraction):
  return ('top_k', fraction)


def quantizer(bits, bucket=None):
  return ('quantizer', bits, bucket)


def identity():
  return ('identity',)


def choco(optimizer, compressor, consensus_rate=1.0):
  return ('choco', optimizer, compressor, consensus_rate)


def d_psgd(optimizer):
  return ('d_psgd', optimizer)


def free(*args, **kwargs):
  return (args, kwargs)


COMPRESSORS = {'top_k': top_k, 'quantizer': quantizer, 'identity': identity}
ALGORITHMS = {'choco': choco, 'd_psgd': d_psgd}

# -- parse ---------------------------------------------------------------------------------------

names = st.from_regex(r'[a-z_][a-z0-9_]{0,8}', fullmatch=True).filter(
  lambda name: not keyword.iskeyword(name)
)
scalars = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(st.characters(exclude_categories=['Cs']), max_size=8)
  | st.binary(max_size=8)
)
literals = st.recursive(
  scalars,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(scalars, inner, max_size=3)
  ),
  max_leaves=6,
)
calls = st.recursive(
  st.builds(spec.Call, names, st.just(()), st.just({})),
  lambda inner: st.builds(
    spec.Call,
    names,
    st.lists(inner | literals, max_size=3).map(tuple),
    st.dictionaries(names, inner | literals, max_size=3),
  ),
  max_leaves=4,
)


def render(value):
  if not isinstance(value, spec.Call):
    return repr(value)
  args = [render(arg) for arg in value.args]
  args += [f'{key}={render(arg)}' for key, arg in value.kwargs.items()]
  return f'{value.name}({", ".join(args)})'


@settings(deadline=None)
@given(calls)
def test_parse_inverts_rendering(call):
  # repr tells 1 from True and 0.0 from -0.0, == does not.
  assert repr(spec.parse(render(call))) == repr(call)


@settings(deadline=None)
@given(literals, literals)
def test_literals_reach_the_callable(positional, named):
  args, kwargs = spec.build(f'free({positional!r}, key={named!r})', {'free': free})
  assert repr(args) == repr((positional,))
  assert repr(kwargs) == repr({'key': named})


@settings(deadline=None)
@given(st.text(max_size=30) | st.text('abf()[]{}.,=*-+\'"\\:0 1\n', max_size=30))
def test_any_text_is_a_call_or_a_value_error(text):
  try:
    call = spec.parse(text)
  except ValueError:
    return
  assert isinstance(call, spec.Call)


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('-3', -3),
    ('1e-4', 1e-4),
    ('-2.5E+3', -2500.0),
    ('1_000', 1000),
    ('None', None),
    ('{100: 0.1, 200: 0.01}', {100: 0.1, 200: 0.01}),
  ],
)
def test_literals(text, value):
  assert spec.parse(f'f({text})') == spec.Call('f', (value,), {})


@pytest.mark.parametrize('text', ['identity', 'identity()', '  identity ( ) ', '\tidentity\n'])
def test_bare_names_and_blanks(text):
  assert spec.parse(text) == spec.Call('identity', (), {})


@pytest.mark.parametrize(
  'argument',
  [
    'x.y',
    '().__class__.__base__.__subclasses__()',
    "__import__('os').system('true')",
    'f(1)(2)',
    '1 + 1',
    '9 ** 9 ** 9',
    'not True',
    '1 < 2',
    'a and b',
    '1 if x else 2',
    'lambda: 0',
    '[x for x in y]',
    '(x for x in y)',
    '{x: x for x in y}',
    "f'{x}'",
    'f\'{__import__("os")}\'',
    '*x',
    '**x',
    'x[0]',
    '(y := 1)',
    '(yield)',
    "[open('file')]",
    '{[]: 1}',
  ],
)
def test_only_literals_are_allowed(argument):
  with pytest.raises(ValueError, match='only literals'):
    spec.build(f'free({argument})', {'free': free})


@pytest.mark.parametrize('text', ['x.y()', 'f(1)(2)', 'lambda: 0', 'a + b', '(x := f)', '[f]'])
def test_only_calls_of_names_are_allowed(text):
  with pytest.raises(ValueError, match=r'only literals|is not of the form'):
    spec.build(text, {'f': free, 'x': free, 'a': free, 'b': free})


@pytest.mark.parametrize('text', ['3', "'top_k'", '[1]', 'None', '-1'])
def test_a_literal_is_no_spec(text):
  with pytest.raises(ValueError, match='is not of the form name or name'):
    spec.parse(text)


@pytest.mark.parametrize('text', ["__import__('os')", "open('file', 'w')", "exec('1')", 'eval'])
def test_builtins_are_unknown(text):
  for hostile in (text, f'top_k({text})', f'top_k(fraction={text})'):
    with pytest.raises(ValueError, match='unknown name'):
      spec.build(hostile, COMPRESSORS)


@pytest.mark.parametrize(
  'text',
  [
    '',
    'import os',
    'a; b',
    'a = 1',
    'top_k(0.01',
    'f\0(1)',
    '\ud800',
    '(' * 5000,
    '-' * 100_000 + '1',
    'f' + '(f' * 150 + ')' * 149,
    'f(' + '1' * 10_000 + ')',
    'x' + '.y' * 50_000,
  ],
  ids=range(12),
)
def test_unreadable_text(text):
  with pytest.raises(ValueError, match=r'cannot read|only literals'):
    spec.parse(text)


def test_syntax_errors_show_text_and_position():
  with pytest.raises(ValueError, match=r"cannot read 'top_k\(0\.1 0\.2\)' at position 7"):
    spec.parse('top_k(0.1 0.2)')


def test_deep_nesting():
  assert spec.build('f(x=' * 190 + '1' + ')' * 190, {'f': lambda x: x}) == 1


def test_repeated_keywords():
  with pytest.raises(ValueError, match=r"'a' is given twice"):
    spec.parse('f(a=1, a=2)')


# -- build ---------------------------------------------------------------------------------------


def test_build_from_a_module():
  module = types.ModuleType('module')
  module.__all__ = ['top_k']
  module.top_k = top_k
  module.hidden = top_k
  assert spec.build('top_k(0.5)', module) == ('top_k', 0.5)
  with pytest.raises(ValueError, match="unknown name 'hidden'"):
    spec.build('hidden(0.5)', module)


def test_nested_specs_are_searched_in_order():
  namespaces = (ALGORITHMS, COMPRESSORS, {'top_k': free, 'free': free})
  built = spec.build('choco(free(1), compressor=top_k(-1e-2))', namespaces)
  assert built == ('choco', ((1,), {}), ('top_k', -0.01), 1.0)


def test_a_bare_nested_name_is_called():
  built = spec.build('choco(1, identity)', [ALGORITHMS, COMPRESSORS])
  assert built == ('choco', 1, ('identity',), 1.0)


def test_the_outermost_name_is_of_the_first_namespace():
  with pytest.raises(ValueError, match=r"unknown algorithm 'top_k'. Known: choco, d_psgd$"):
    spec.build('top_k(0.1)', (ALGORITHMS, COMPRESSORS), kind='algorithm')


def test_extra_arguments():
  extra = {'optimizer': 'sgd', 'compressor': 'identity'}
  assert spec.build('choco', ALGORITHMS, **extra) == ('choco', 'sgd', 'identity', 1.0)
  # Not accepted.
  assert spec.build('d_psgd', ALGORITHMS, **extra) == ('d_psgd', 'sgd')
  # Given by keyword, given by position.
  assert spec.build('choco(compressor=1)', ALGORITHMS, **extra) == ('choco', 'sgd', 1, 1.0)
  assert spec.build('choco(1, 2)', ALGORITHMS, **extra) == ('choco', 1, 2, 1.0)
  # Only for the outermost call.
  with pytest.raises(ValueError, match="missing a required argument: 'fraction'"):
    spec.build('choco(1, top_k)', (ALGORITHMS, COMPRESSORS), fraction=0.1)


def test_extra_arguments_do_not_collide_with_those_of_build():
  assert spec.build('f', {'f': lambda text: text}, text=1) == 1


def test_unknown_names_are_explained():
  with pytest.raises(ValueError, match='unknown compressor') as caught:
    spec.build('quantiser(4)', COMPRESSORS, kind='compressor')
  assert str(caught.value) == (
    "unknown compressor 'quantiser'; did you mean 'quantizer'? Known: identity, quantizer, top_k"
  )


@pytest.mark.parametrize(
  ('name', 'meant'), [('id', 'identity'), ('to', 'top_k'), ('qua', 'quantizer')]
)
def test_the_beginning_of_a_name_is_enough_for_a_hint(name, meant):
  with pytest.raises(ValueError, match=f"unknown name '{name}'; did you mean '{meant}'"):
    spec.build(f'{name}(4)', COMPRESSORS)


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('quantizer(bit=4)', "'bit'"),
    ('quantizer(4, bits=4)', "'bits'"),
    ('quantizer()', "'bits'"),
    ('quantizer', "'bits'"),
    ('quantizer(1, 2, 3)', 'too many positional arguments'),
  ],
)
def test_wrong_arguments_are_explained(text, problem):
  with pytest.raises(ValueError, match=problem) as caught:
    spec.build(text, COMPRESSORS)
  assert 'quantizer(bits, bucket=None)' in str(caught.value)


def test_errors_of_the_callable_pass_through():
  def strict(bits: int):
    raise ValueError('bits must be positive')

  with pytest.raises(ValueError, match=r'^bits must be positive$'):
    spec.build('strict(-1)', {'strict': strict})


# -- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'optimizer'),
  [
    ('sgd(0.1, momentum=0.9)', optax.sgd(0.1, momentum=0.9)),
    ('adamw(1e-3)', optax.adamw(1e-3)),
    (
      'sgd(piecewise_constant_schedule(0.1, {1: 0.5}))',
      optax.sgd(optax.piecewise_constant_schedule(0.1, {1: 0.5})),
    ),
    (
      'chain(clip_by_global_norm(1.0), sgd(cosine_decay_schedule(0.1, 10)))',
      optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 10))),
    ),
  ],
)
def test_optimizers(text, optimizer):
  params = jnp.arange(3.0)
  built = spec.build(text, spec.optimizers(), kind='optimizer')
  # Inside, optax counts steps in int32 and promotes.
  with jax.numpy_dtype_promotion('standard'):
    expected, _ = optimizer.update(params, optimizer.init(params), params)
    updates, _ = built.update(params, built.init(params), params)
  chex.assert_trees_all_equal(updates, expected)


def test_signatures_are_shown_without_types():
  with pytest.raises(ValueError, match=r'sgd\(learning_rate, momentum=None, nesterov=False'):
    spec.build('sgd', spec.optimizers())
