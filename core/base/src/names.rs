//! Names of an enum's variants.

/// Names of an enum's variants: the constant `ALL`, the method `name`, and `FromStr`, whose error lists the names.
///
/// ```
/// #[derive(Debug, Clone, Copy, PartialEq)]
/// pub enum Speed {
///     Fast,
///     Slow,
/// }
///
/// qhx_base::names! { Speed: Fast = "fast", Slow = "slow" }
///
/// assert_eq!(Speed::ALL.map(Speed::name), ["fast", "slow"]);
/// assert_eq!("slow".parse(), Ok(Speed::Slow));
/// assert_eq!("idle".parse::<Speed>(), Err("expected fast or slow".to_owned()));
/// ```
#[macro_export]
macro_rules! names {
    ($type:ident: $($variant:ident = $name:literal),+ $(,)?) => {
        impl $type {
            /// All of them.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The name in options, messages and JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }

        impl ::std::str::FromStr for $type {
            type Err = ::std::string::String;

            /// The variant of this name.
            fn from_str(text: &str) -> ::std::result::Result<Self, Self::Err> {
                let found = Self::ALL.into_iter().find(|variant| variant.name() == text);
                found.ok_or_else(|| $crate::expected(&Self::ALL.map(Self::name)))
            }
        }
    };
}

/// Message about a text that is none of these names: `expected a, b or c`.
pub fn expected(names: &[&str]) -> String {
    match names {
        [names @ .., last] if !names.is_empty() => {
            format!("expected {} or {last}", names.join(", "))
        }
        _ => format!("expected {}", names.concat()),
    }
}
