//! The recipes that a program has: those of this crate, and those that any other crate registers.

use std::collections::BTreeMap;
use std::fmt;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::keys;
use crate::recipe::{CONTEXTS, Caches, Precision, Recipe, RecipeOptions, Task};

/// Makes graphs and a plan of a checkpoint.
pub type MakeRecipe = fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>;

/// A recipe and what it is for. See [`register_recipe!`](crate::register_recipe).
#[derive(Debug, Clone, Copy)]
pub struct RecipeEntry {
    classes: &'static [&'static str],
    make: MakeRecipe,
    tasks: &'static [Task],
    prefill_graphs: bool,
    smaller_contexts: bool,
    int8_caches: bool,
    shards: usize,
    longest: fn(&Checkpoint, Task) -> Option<usize>,
    default_context: fn(&Checkpoint) -> Option<usize>,
    options: &'static [RecipeOption],
}

/// An option that only some recipes know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecipeOption {
    /// Its name.
    pub name: &'static str,
    /// Allowed values, the default first. If the list is empty, any text is allowed, and none is the default.
    pub values: &'static [&'static str],
    /// Purpose of the option, in one line.
    pub help: &'static str,
}

impl RecipeOption {
    /// Chosen value: the value given, or else the default, also where a recipe is applied without its registration.
    pub fn choice<'a>(&self, options: &'a RecipeOptions) -> Option<&'a str> {
        options.choice(self.name).or(self.values.first().copied())
    }

    /// The precision that is chosen; fp16 where the value is none.
    pub fn precision(&self, options: &RecipeOptions) -> Precision {
        self.chosen_precision(options).unwrap_or_default()
    }

    /// The precision that is chosen, if one is.
    pub fn chosen_precision(&self, options: &RecipeOptions) -> Option<Precision> {
        self.choice(options).and_then(|name| name.parse().ok())
    }
}

impl fmt::Display for RecipeOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = if self.values.is_empty() { "…".to_owned() } else { self.values.join("|") };
        write!(f, "{}={values}: {}", self.name, self.help)
    }
}

impl RecipeEntry {
    /// A recipe for checkpoints whose `architectures[0]` is one of `classes`. It generates text, and consumes
    /// prompts token by token.
    pub const fn new(classes: &'static [&'static str], make: MakeRecipe) -> Self {
        Self {
            classes,
            make,
            tasks: &[Task::Generate],
            prefill_graphs: false,
            smaller_contexts: false,
            int8_caches: false,
            shards: 1,
            longest: |_, _| None,
            default_context: |_| None,
            options: &[],
        }
    }

    /// The tasks that it has graphs for.
    pub const fn tasks(self, tasks: &'static [Task]) -> Self {
        Self { tasks, ..self }
    }

    /// It has graphs that take several tokens of a prompt, see [`RecipeOptions::prefill`].
    pub const fn prefill_graphs(self) -> Self {
        Self { prefill_graphs: true, ..self }
    }

    /// It has graphs for smaller contexts, see [`RecipeOptions::contexts`]: caches have as many rows as a
    /// [`crate::kit::Step`] has positions.
    pub const fn smaller_contexts(self) -> Self {
        Self { smaller_contexts: true, ..self }
    }

    /// It has graphs whose caches are int8, see [`RecipeOptions::caches`]: all of them are those of a
    /// [`crate::kit::Step`].
    pub const fn int8_caches(self) -> Self {
        Self { int8_caches: true, ..self }
    }

    /// The contexts that its layers are spread over by default, where they fit; 1 without this.
    pub const fn shards(self, shards: usize) -> Self {
        Self { shards, ..self }
    }

    /// Sets the bound of the context beside `max_position_embeddings`, such as a sliding window; none where there is no
    /// such bound. The default context is no longer.
    pub const fn longest(self, longest: fn(&Checkpoint, Task) -> Option<usize>) -> Self {
        Self { longest, ..self }
    }

    /// Sets a default context for texts that is shorter than that of other recipes; none where it is not.
    pub const fn default_context(self, default: fn(&Checkpoint) -> Option<usize>) -> Self {
        Self { default_context: default, ..self }
    }

    /// The options that it knows beside those of every recipe, see [`RecipeOptions::choice`].
    pub const fn options(self, options: &'static [RecipeOption]) -> Self {
        Self { options, ..self }
    }

    /// The task that is asked for, or else the one that fits the checkpoint, see [`task`].
    fn task(&self, checkpoint: &Checkpoint, asked: Option<Task>) -> Result<Task> {
        let task = match (asked, self.tasks) {
            (Some(asked), _) => asked,
            (None, [only]) => *only,
            (None, several) if several.contains(&Task::Embed) && declares_pooling(checkpoint) => {
                Task::Embed
            }
            (None, several) => several.first().copied().unwrap_or_default(),
        };
        if self.tasks.contains(&task) {
            return Ok(task);
        }
        let what = format!(
            "{}: a {} has no recipe for the task {}",
            checkpoint.dir().display(),
            checkpoint.architecture().unwrap_or_default(),
            task.name()
        );
        let options: Vec<_> =
            self.tasks.iter().map(|task| format!("--task {}", task.name())).collect();
        let default = if options.len() == 1 { ", or no --task" } else { "" };
        Err(Error::new(ErrorKind::Usage, what)
            .hint(format!("give {}{default}", options.join(" or "))))
    }

    /// All of its options with their values, asked for or default.
    fn choices(&self, asked: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
        let usage = |message: String| Error::new(ErrorKind::Usage, message);
        for name in asked.keys() {
            if !self.options.iter().any(|option| option.name == name) {
                let known: Vec<_> = self.options.iter().map(ToString::to_string).collect();
                let hint = match known.as_slice() {
                    [] => "its recipe has no options of its own".to_owned(),
                    options => format!("its recipe has {}", options.join("; ")),
                };
                let classes = self.classes.join(", ");
                return Err(usage(format!("{classes}: no recipe option {name:?}")).hint(hint));
            }
        }
        let mut choices = BTreeMap::new();
        for option in self.options {
            let default = option.values.first().copied();
            let Some(value) = asked.get(option.name).map(String::as_str).or(default) else {
                continue;
            };
            if !option.values.is_empty() && !option.values.contains(&value) {
                return Err(usage(format!(
                    "recipe option {}: {value:?}, expected {}",
                    option.name,
                    option.values.join(" or ")
                )));
            }
            choices.insert(option.name.to_owned(), value.to_owned());
        }
        Ok(choices)
    }
}

/// An entry, and the crate that registers it.
#[derive(Debug)]
#[doc(hidden)]
pub struct Registration {
    pub entry: RecipeEntry,
    pub package: &'static str,
}

inventory::collect!(Registration);

/// Registers a [`RecipeEntry`], a constant expression: [`forge`](crate::forge()), plans, estimates and the program
/// (`qhx_forge::main()`) find it by the model class of the checkpoint.
///
/// A program has the recipes of each crate that it refers to, with `use my_recipe as _;` for instance.
///
/// ```
/// use qhx_base::Result;
/// use qhx_checkpoint::Checkpoint;
/// use qhx_forge::recipe::{Recipe, RecipeOptions};
/// use qhx_forge::{RecipeEntry, architectures, register_recipe};
///
/// fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
/// #    let _ = (checkpoint, options);
///     // …
/// #    Err(qhx_base::Error::new(qhx_base::ErrorKind::Graph, "an example"))
/// }
///
/// register_recipe!(RecipeEntry::new(&["MyForCausalLM"], recipe).prefill_graphs());
///
/// assert!(architectures()?.contains(&"MyForCausalLM"));
/// # Ok::<(), qhx_base::Error>(())
/// ```
#[macro_export]
macro_rules! register_recipe {
    ($entry:expr) => {
        $crate::inventory::submit! {
            $crate::registry::Registration { entry: $entry, package: env!("CARGO_PKG_NAME") }
        }
    };
}

/// The entries by class. Errors when two crates, or one twice, register the same class.
fn by_class<'a>(
    registered: impl IntoIterator<Item = &'a Registration>,
) -> Result<BTreeMap<&'static str, &'a Registration>> {
    let mut found = BTreeMap::new();
    for registration in registered {
        for class in registration.entry.classes {
            let Some(first): Option<&Registration> = found.insert(*class, registration) else {
                continue;
            };
            let mut packages = [first.package, registration.package];
            packages.sort_unstable();
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "the model class {class} has two recipes, one of the crate {} and one of {}",
                    packages[0], packages[1]
                ),
            )
            .hint("build the program with one of them"));
        }
    }
    Ok(found)
}

fn registered() -> Result<BTreeMap<&'static str, &'static Registration>> {
    by_class(inventory::iter::<Registration>)
}

/// Model classes that have a recipe, sorted.
///
/// # Errors
/// When two crates register the same class.
pub fn architectures() -> Result<Vec<&'static str>> {
    Ok(registered()?.into_keys().collect())
}

/// The entry for a checkpoint's model class.
fn entry(checkpoint: &Checkpoint) -> Result<RecipeEntry> {
    let found = checkpoint.architecture().unwrap_or_default();
    let recipes = registered()?;
    recipes.get(found).map(|registration| registration.entry).ok_or_else(|| {
        let classes: Vec<_> = recipes.into_keys().collect();
        Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: no recipe for architectures[0] = {found:?}; there is one for {}",
                checkpoint.config_path().display(),
                classes.join(", ")
            ),
        )
        .hint(
            "a class of your own needs a recipe and a host-op, and no change to qhx: \
             docs/adding-a-family.md has the steps, examples/smolvlm is one",
        )
    })
}

/// The task of a bundle of the checkpoint: the one that is asked for, or the only one of the model's class. Where the
/// class has several, vectors are made if `modules.json` or a GGUF file declares how texts are pooled, and otherwise
/// the first of them, which is text. Of a class without a recipe it is what is asked for.
///
/// # Errors
/// When the class has no such task.
pub fn task(checkpoint: &Checkpoint, asked: Option<Task>) -> Result<Task> {
    match registered()?.get(checkpoint.architecture().unwrap_or_default()) {
        Some(registration) => registration.entry.task(checkpoint, asked),
        None => Ok(asked.unwrap_or_default()),
    }
}

/// True where the checkpoint declares how the rows of a text become a vector.
fn declares_pooling(checkpoint: &Checkpoint) -> bool {
    let inside = checkpoint.inside().map(|inside| inside.pooling());
    checkpoint.dir().join("modules.json").exists() || matches!(inside, Some(Ok(Some(_))))
}

/// Applies the recipe for the checkpoint's model class.
///
/// # Errors
/// When the class has no recipe, the recipe lacks the task or an option, or the checkpoint does not fit it.
pub fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let entry = entry(checkpoint)?;
    let found = checkpoint.architecture().unwrap_or_default();
    // Options that were never given a task have this one.
    let asked = Some(options.task).filter(|task| *task != Task::default() || entry.tasks.len() > 1);
    let task = entry.task(checkpoint, asked)?;
    if options.prefill.as_ref().is_some_and(|rows| !rows.is_empty()) && !entry.prefill_graphs {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "prefill graphs are asked for, but a {found} consumes its prompt token by token"
            ),
        )
        .hint("omit the option"));
    }
    check_contexts(options, entry.smaller_contexts && task == Task::Generate, found)?;
    if options.caches == Caches::Int8 && !(entry.int8_caches && task == Task::Generate) {
        let what = format!("--caches int8: the caches of a {found} hold f16 alone");
        return Err(Error::new(ErrorKind::Usage, what).hint("omit --caches"));
    }
    keys::check(checkpoint, found)?;
    let choices = entry.choices(&options.choices)?;
    let mut recipe = (entry.make)(checkpoint, &RecipeOptions { choices, task, ..options.clone() })?;
    if !options.contexts.is_empty() {
        recipe.params.insert(CONTEXTS.to_owned(), json!(options.contexts));
    }
    Ok(recipe)
}

/// Errors for smaller contexts that the recipe lacks, or that are none.
fn check_contexts(options: &RecipeOptions, made: bool, found: &str) -> Result<()> {
    if options.contexts.is_empty() {
        return Ok(());
    }
    let fail = |what: String, hint: &str| Err(Error::new(ErrorKind::Usage, what).hint(hint));
    let list: Vec<_> = options.contexts.iter().map(usize::to_string).collect();
    let list = list.join(",");
    if !made {
        let what = format!("--contexts {list}: the graphs of a {found} have one context");
        return fail(what, "omit --contexts");
    }
    let (max_ctx, mut before) = (options.max_ctx, 0);
    for &positions in &options.contexts {
        let wrong = match (positions > before, positions < max_ctx) {
            (true, true) => None,
            (false, _) => Some(format!("above {before}")),
            (_, false) => Some(format!("below {max_ctx}")),
        };
        if let Some(wrong) = wrong {
            return fail(
                format!("--contexts {list} with --max-ctx {max_ctx}: {positions} is not {wrong}"),
                "name smaller contexts in ascending order, each below --max-ctx",
            );
        }
        before = positions;
    }
    Ok(())
}

/// The min number of shards that a checkpoint's recipe makes, see [`RecipeEntry::shards`].
pub(crate) fn min_shards(checkpoint: &Checkpoint) -> usize {
    // What is wrong here is reported when the recipe is applied.
    let recipes = registered().unwrap_or_default();
    let found = recipes.get(checkpoint.architecture().unwrap_or_default());
    let layers = checkpoint.text_config().get("num_hidden_layers").and_then(Value::as_u64);
    let max = layers.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX).max(1);
    found.map_or(1, |found| found.entry.shards).min(max)
}

/// The default context of a checkpoint's recipe, see [`RecipeEntry::default_context`].
pub(crate) fn default_context(checkpoint: &Checkpoint) -> Option<usize> {
    // What is wrong here is reported when the recipe is applied.
    let recipes = registered().unwrap_or_default();
    let found = recipes.get(checkpoint.architecture().unwrap_or_default());
    found.and_then(|found| (found.entry.default_context)(checkpoint))
}

/// The longest context that a checkpoint's recipe makes for a task; none without a limit.
pub(crate) fn longest(checkpoint: &Checkpoint, task: Task) -> Option<usize> {
    let positions = checkpoint
        .text_config()
        .get("max_position_embeddings")
        .and_then(Value::as_u64)
        .and_then(|n| usize::try_from(n).ok());
    // What is wrong here is reported when the recipe is applied.
    let recipes = registered().unwrap_or_default();
    let found = recipes.get(checkpoint.architecture().unwrap_or_default());
    let own = found.and_then(|found| (found.entry.longest)(checkpoint, task));
    positions.into_iter().chain(own).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTION: RecipeOption =
        RecipeOption { name: "form", values: &["w8a16", "fp16"], help: "what it takes" };
    const FREE: RecipeOption = RecipeOption { name: "size", values: &[], help: "how large it is" };

    fn nothing(_: &Checkpoint, _: &RecipeOptions) -> Result<Recipe> {
        Err(Error::new(ErrorKind::Internal, "never made"))
    }

    fn registration(classes: &'static [&'static str], package: &'static str) -> Registration {
        Registration { entry: RecipeEntry::new(classes, nothing), package }
    }

    #[test]
    fn a_class_that_two_crates_register_is_an_error_that_names_both() {
        let [first, second, third] = [
            registration(&["A", "B"], "mine"),
            registration(&["C"], "yours"),
            registration(&["D", "B"], "theirs"),
        ];
        let classes: Vec<_> = by_class([&second, &first]).unwrap().into_keys().collect();
        assert_eq!(classes, ["A", "B", "C"]);
        for order in [[&first, &second, &third], [&third, &second, &first]] {
            let error = by_class(order).unwrap_err();
            assert_eq!(
                error.message(),
                "the model class B has two recipes, one of the crate mine and one of theirs"
            );
        }
    }

    #[test]
    fn unknown_options_are_refused_with_a_list_of_the_known() {
        let entry = RecipeEntry::new(&["A"], nothing).options(&[OPTION]);
        let choose = |pairs: &[(&str, &str)]| {
            let given = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            entry.choices(&given.collect())
        };
        assert_eq!(choose(&[]).unwrap()["form"], "w8a16");
        assert_eq!(choose(&[("form", "fp16")]).unwrap()["form"], "fp16");
        let error = choose(&[("form", "f32")]).unwrap_err();
        assert_eq!(error.message(), "recipe option form: \"f32\", expected w8a16 or fp16");
        let error = choose(&[("from", "fp16")]).unwrap_err();
        assert_eq!(error.message(), "A: no recipe option \"from\"");
        assert_eq!(error.hint_text(), Some("its recipe has form=w8a16|fp16: what it takes"));
    }

    #[test]
    fn an_option_has_one_default_however_a_recipe_is_applied() {
        let mut options = RecipeOptions::default();
        assert_eq!(OPTION.choice(&options), Some("w8a16"));
        assert_eq!(FREE.choice(&options), None);
        options.choices.insert("form".to_owned(), "fp16".to_owned());
        assert_eq!(OPTION.choice(&options), Some("fp16"));
    }

    #[test]
    fn an_option_without_listed_values_takes_any_and_has_no_default() {
        let entry = RecipeEntry::new(&["A"], nothing).options(&[OPTION, FREE]);
        let given = BTreeMap::from([("size".to_owned(), "32,64".to_owned())]);
        assert_eq!(entry.choices(&given).unwrap()["size"], "32,64");
        assert!(!entry.choices(&BTreeMap::new()).unwrap().contains_key("size"));
        assert_eq!(FREE.to_string(), "size=…: how large it is");
    }
}
