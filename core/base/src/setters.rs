//! Setters of option types.

/// Methods that set a field each and return the options, for chains of calls.
///
/// An entry `field: Type` sets the field of its name. An entry `name(argument: Type) => field = value` gives the method
/// a name of its own, sets a field of a field, or converts the argument. Comments become those of the methods.
///
/// ```
/// #[derive(Default)]
/// pub struct Options {
///     threads: Option<usize>,
///     verify: bool,
/// }
///
/// impl Options {
///     qhx_base::setters! {
///         /// Threads that work; one a core by default.
///         threads(threads: impl Into<Option<usize>>) => threads = threads.into(),
///         /// Sets whether files are compared with their hashes.
///         verify: bool,
///     }
/// }
///
/// let options = Options::default().threads(4).verify(true);
/// assert_eq!((options.threads, options.verify), (Some(4), true));
/// ```
#[macro_export]
macro_rules! setters {
    () => {};
    ($(#[$doc:meta])* $field:ident: $type:ty, $($rest:tt)*) => {
        $crate::setters! { $(#[$doc])* $field($field: $type) => $field = $field, $($rest)* }
    };
    ($(#[$doc:meta])* $name:ident($argument:ident: $type:ty) => $($field:ident).+ = $value:expr, $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $argument: $type) -> Self {
            self.$($field).+ = $value;
            self
        }
        $crate::setters! { $($rest)* }
    };
}
