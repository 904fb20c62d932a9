//! The catalogue in `docs/published.md`: bundles that the closed runtime publishes, and which of their checkpoints have
//! a recipe.

use serde_json::Value;

use super::published::compare;

/// The table stands between these lines.
const MARKS: [&str; 2] = ["<!-- table of the catalogue -->\n", "<!-- end of the catalogue -->\n"];
/// Bundles of the catalogue, and how many of them at least have a recipe.
const BUNDLES: [usize; 2] = [64, 54];

#[test]
fn the_page_says_which_models_of_the_catalogue_run() {
    let list: Vec<Value> = serde_json::from_str(include_str!("catalogue.json")).unwrap();
    let classes = qhx_forge::architectures().unwrap();
    let mut covered = 0;
    let mut table = String::new();
    for row in &list {
        let [bundle, class, host_op, missing] =
            ["bundle", "class", "host_op", "missing"].map(|key| row[key].as_str());
        let made = class.is_some_and(|class| classes.contains(&class));
        covered += usize::from(made);
        let code = |name: Option<&str>| name.map_or_else(String::new, |name| format!("`{name}`"));
        let runs = if made { "yes" } else { missing.expect("what is missing") };
        let bundle = bundle.expect("a name");
        table += &format!("| {bundle} | {} | {} | {runs} |\n", code(class), code(host_op));
    }
    let head = "| bundle | class of the checkpoint | published host-op | runs, or what is missing |\n|---|---|---|---|\n";
    let total = list.len();
    let text = format!("{covered} of {total} run.\n\n{head}{table}");
    compare("published.md", MARKS, &text);
    let [bundles, least] = BUNDLES;
    assert!(total == bundles && covered >= least, "{covered} of {total}");
}
