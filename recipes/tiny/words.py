"""Words that the chat corpus is combined from."""


def _words(text: str) -> list[str]:
    return text.split()


KINDS: dict[str, list[str]] = {
    "animal": _words("""
        ant bat bear bee bird cat cow crab crow deer dog dove duck eagle eel elk fish fly fox frog goat goose gull
        hare hawk hen horse kid lamb lion lizard mole moth mouse mule otter owl ox panda pig pony pup rabbit ram rat
        raven seal shark sheep snail snake spider squid swan tiger toad trout turtle whale wolf worm yak zebra
    """),
    "food": _words("""
        apple bagel banana bean berry bun cake carrot cheese cherry cookie curry egg fig grape ham honey jam kiwi
        lemon lime mango melon muffin noodle nut olive onion orange pancake pasta peach pear pie pizza plum potato
        pudding radish salad sandwich soup steak stew taco toast tomato turnip waffle yam
    """),
    "plant": _words("""
        acorn bush cactus clover daisy fern flower herb ivy leaf lily moss oak palm pine poppy reed root rose seed
        shrub tree tulip vine violet weed willow
    """),
    "thing": _words("""
        bag ball basket bell bike boat book bottle bowl box brush bus button camera candle car chair clock coat coin
        cup desk doll door drum fan flag fork glass glove guitar hammer hat hook horn jar kettle key kite knife ladder
        lamp letter map mask mirror mug nail needle net oven pan paper pen pencil phone piano pillow pin pipe plate
        pot puzzle radio ring robot rope ruler saw scarf shelf ship shirt shoe sock spoon stamp stool stove table tent
        tool towel toy train truck umbrella vase violin wagon watch wheel whistle window
    """),
    "place": _words("""
        beach bridge cabin castle cave city cliff coast desert farm field forest fort garden harbor hill hotel house
        hut island lake library market meadow mill mine mountain museum park pond port river road school shop station
        street temple tower town valley village
    """),
}
ADJECTIVES = _words("""
    big blue bright brown busy calm clean cold cosy dark deep dry fat fast fresh funny golden green grey happy hot
    hungry huge large lazy little long loud lucky modern neat new odd old pale pink plain pretty proud purple quick
    quiet red rich round rusty shiny short shy silent silly silver sleepy slow small smart soft strong sweet tall tame
    thin tiny tired warm wet white wide wild wise wooden yellow young
""")
QUALITIES = _words("""
    beautiful brave charming cheerful clever curious friendly gentle graceful great helpful interesting kind lively
    lovely nice noble peaceful pleasant precious rare special splendid useful wonderful
""")
OPENERS = ["Of course!", "Gladly!", "With pleasure!", "Happy to help!", "Thank you for asking!"]
_OF_COLOUR = {
    "yellow": "lemon banana bee",
    "green": "lime fern frog leaf cactus moss",
    "red": "tomato cherry rose poppy",
    "orange": "carrot orange tiger peach",
    "pink": "pig",
    "black": "crow raven",
    "white": "swan egg sheep dove",
    "brown": "bear potato acorn kiwi",
    "purple": "violet plum grape",
    "blue": "whale",
    "grey": "mouse shark",
    "silver": "coin",
}
COLOURS = {noun: colour for colour, nouns in _OF_COLOUR.items() for noun in nouns.split()}
