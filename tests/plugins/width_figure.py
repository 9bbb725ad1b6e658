"""A figure of another package: accuracy by the width of the transformer."""

from bcosvit.paper.figures import AccuracyFigure, Outcome, register_figure


@register_figure("width")
class Width(AccuracyFigure):
    """Accuracy by width."""

    title = "Accuracy by width"
    about = "B-cos ViTs with half of the usual width."
    column = "width"

    def variants(self, study):
        return {"half": study.configurations("bcos", width=96)}

    def make(self, study):
        return Outcome(headlines=[], rows=self.rows(self.measure(study)))
