//! Asks about an image: `image BUNDLE FILE QUESTION`.

use qhx::media::attach;
use qhx::{Attachment, Bundle, Message, Request};

fn main() -> qhx::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bundle, file, question] = &arguments[..] else {
        eprintln!("expected a bundle, an image and a question");
        return Ok(());
    };
    let mut model = Bundle::open(bundle)?.model()?;
    let image = Attachment::image(file)?;
    let (content, _) = attach(question.clone(), &[image], &model, None)?;
    let request = Request::chat([Message::user(content)]).max_new(32);
    let generation = model.start(&request)?.finish()?;
    println!("{}", generation.text);
    Ok(())
}
