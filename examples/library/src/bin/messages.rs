//! A conversation whose messages the app holds: `messages BUNDLE QUESTION…`.

use qhx::{Bundle, Message, Request};

fn main() -> qhx::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut model = Bundle::open(arguments.next().unwrap_or_default())?.model()?;
    let mut messages = vec![Message::system("Answer in one sentence.")];
    for question in arguments {
        messages.push(Message::user(question));
        let request = Request::chat(messages.clone()).max_new(64);
        let answer = model.start(&request)?.finish()?;
        println!("{}", answer.text);
        messages.push(Message::assistant(answer.text));
    }
    Ok(())
}
