"""Messages for chat templates."""


def get_message_json(model_name, prompt, role="user", num_images=0):
    return {"role": role, "content": "<|image_pad|>\n" * num_images + prompt}
