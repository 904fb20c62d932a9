//! Tests of Jinja2: what stands after `is`.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

use super::python::fail;

type Test = fn(&[Value]) -> Result<bool, Error>;

const TESTS: [(&str, Test); 36] = [
    ("defined", |args| Ok(!subject(args).is_undefined())),
    ("undefined", |args| Ok(subject(args).is_undefined())),
    ("none", |args| Ok(subject(args).is_none())),
    ("boolean", |args| Ok(subject(args).kind() == ValueKind::Bool)),
    ("true", |args| Ok(subject(args).kind() == ValueKind::Bool && subject(args).is_true())),
    ("false", |args| Ok(subject(args).kind() == ValueKind::Bool && !subject(args).is_true())),
    ("integer", |args| Ok(subject(args).kind() == ValueKind::Number && subject(args).is_integer())),
    ("float", |args| Ok(subject(args).kind() == ValueKind::Number && !subject(args).is_integer())),
    ("number", |args| Ok(matches!(subject(args).kind(), ValueKind::Number | ValueKind::Bool))),
    ("string", |args| Ok(subject(args).kind() == ValueKind::String)),
    ("mapping", |args| Ok(subject(args).kind() == ValueKind::Map)),
    ("sequence", |args| Ok(has_items(subject(args)))),
    ("iterable", |args| Ok(has_items(subject(args)))),
    ("callable", |args| {
        Ok(matches!(subject(args).kind(), ValueKind::Plain | ValueKind::Undefined))
    }),
    ("escaped", |_| Ok(false)),
    ("lower", |args| cased(args, char::is_lowercase)),
    ("upper", |args| cased(args, char::is_uppercase)),
    ("even", |args| Ok(remainder(subject(args), 2)? == 0)),
    ("odd", |args| Ok(remainder(subject(args), 2)? == 1)),
    ("divisibleby", |args| match i128::try_from(argument(args)?.clone()) {
        Ok(by) if by != 0 => Ok(remainder(subject(args), by)? == 0),
        _ => Err(fail("divisibleby: expected an integer other than 0")),
    }),
    // What has no address is the same when it is equal and of one type.
    ("sameas", |args| {
        let (a, b) = (subject(args), argument(args)?);
        Ok(a.kind() == b.kind() && a == b && a.is_integer() == b.is_integer())
    }),
    ("eq", |args| Ok(subject(args) == argument(args)?)),
    ("equalto", |args| Ok(subject(args) == argument(args)?)),
    ("==", |args| Ok(subject(args) == argument(args)?)),
    ("ne", |args| Ok(subject(args) != argument(args)?)),
    ("!=", |args| Ok(subject(args) != argument(args)?)),
    ("lt", |args| Ok(subject(args) < argument(args)?)),
    ("lessthan", |args| Ok(subject(args) < argument(args)?)),
    ("<", |args| Ok(subject(args) < argument(args)?)),
    ("le", |args| Ok(subject(args) <= argument(args)?)),
    ("<=", |args| Ok(subject(args) <= argument(args)?)),
    ("gt", |args| Ok(subject(args) > argument(args)?)),
    ("greaterthan", |args| Ok(subject(args) > argument(args)?)),
    (">", |args| Ok(subject(args) > argument(args)?)),
    ("ge", |args| Ok(subject(args) >= argument(args)?)),
    (">=", |args| Ok(subject(args) >= argument(args)?)),
];

/// Gives the environment the tests of Jinja2.
pub(super) fn add(environment: &mut Environment<'static>) {
    for (name, test) in TESTS {
        environment.add_test(name, move |args: Rest<ValueOrKwargs>| test(&args.into_values()));
    }
    environment.add_test("in", minijinja::tests::is_in);
}

fn subject(args: &[Value]) -> &Value {
    args.first().unwrap_or(&Value::UNDEFINED)
}

fn argument(args: &[Value]) -> Result<&Value, Error> {
    args.get(1).ok_or_else(|| fail("the test needs a value to compare with"))
}

/// True if Python's `iter` takes the value: texts and undefined values have items, none and numbers do not.
fn has_items(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String
            | ValueKind::Seq
            | ValueKind::Iterable
            | ValueKind::Map
            | ValueKind::Undefined
    )
}

fn cased(args: &[Value], test: fn(char) -> bool) -> Result<bool, Error> {
    let text = super::python::str(subject(args))?;
    let mut cased = text.chars().filter(|c| c.is_lowercase() || c.is_uppercase()).peekable();
    Ok(cased.peek().is_some() && cased.all(test))
}

fn remainder(value: &Value, by: i128) -> Result<i128, Error> {
    match i128::try_from(value.clone()) {
        Ok(number) => number.checked_rem_euclid(by).ok_or_else(|| fail("the number is too large")),
        Err(_) => Err(fail(format!("expected an integer, found {}", value.kind()))),
    }
}
